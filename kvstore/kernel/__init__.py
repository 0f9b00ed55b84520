"""The copy kernel: engine arrays to block payloads and back, with CRC32C in the same pass.

The work is done in C with the GIL released (``native/``); this package checks every bound before it calls, so
that no argument can make it touch memory that the caller didn't name. The exception is an address: payloads are given
as addresses, and whoever passes them vouches for the memory behind them.
"""

from kvstore.kernel.checksum import crc32c, crc32c_paths, crc32c_with, force_crc32c
from kvstore.kernel.chunks import restore_chunks
from kvstore.kernel.copying import SEGMENT_ALIGN, default_threads, gather, payload_bytes, scatter
from kvstore.kernel.cuda import CudaDevice, CudaDriver, CudaEvent
from kvstore.kernel.filemap import FileMap
from kvstore.kernel.headers import crc32c_each, read_headers
from kvstore.kernel.heap import keep_freed
from kvstore.kernel.progress import progress_end, progress_set, progress_wait
from kvstore.kernel.restoring import FileSource, Restored, read_error, restore
from kvstore.kernel.rows import Rows, address_of
from kvstore.kernel.target import Target, check_destinations
from kvstore.kernel.watch import MapWatch, watch_here
from kvstore.kernel.window import Window
from kvstore.kernel.writes import Writes

__all__ = [
    "SEGMENT_ALIGN",
    "CudaDevice",
    "CudaDriver",
    "CudaEvent",
    "FileMap",
    "FileSource",
    "MapWatch",
    "Restored",
    "Rows",
    "Target",
    "Window",
    "Writes",
    "address_of",
    "check_destinations",
    "crc32c",
    "crc32c_each",
    "crc32c_paths",
    "crc32c_with",
    "default_threads",
    "force_crc32c",
    "gather",
    "keep_freed",
    "payload_bytes",
    "progress_end",
    "progress_set",
    "progress_wait",
    "read_error",
    "read_headers",
    "restore",
    "restore_chunks",
    "scatter",
    "watch_here",
]
