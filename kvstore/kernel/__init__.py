"""The copy kernel: engine arrays to block payloads and back, with CRC32C in the same pass.

The work is done in C with the GIL released (``native/``); this package checks every bound before it calls, so
that no argument can make it touch memory that the caller didn't name. The exception is an address: payloads are given
as addresses, and whoever passes them vouches for the memory behind them.
"""

from kvstore.kernel.checksum import crc32c, crc32c_paths, crc32c_with, force_crc32c
from kvstore.kernel.copying import SEGMENT_ALIGN, default_threads, gather, payload_bytes, scatter
from kvstore.kernel.filemap import FileMap
from kvstore.kernel.headers import crc32c_each, read_headers
from kvstore.kernel.rows import Rows

__all__ = [
    "SEGMENT_ALIGN",
    "FileMap",
    "Rows",
    "crc32c",
    "crc32c_each",
    "crc32c_paths",
    "crc32c_with",
    "default_threads",
    "force_crc32c",
    "gather",
    "payload_bytes",
    "read_headers",
    "scatter",
]
