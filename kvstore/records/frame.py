"""The envelope of every record: its own key and a CRC32C, so that a wrong record is never taken for the right one.

A damaged tree page can hand back the record of another key in silence; a record that carries its key shows it.
"""

from __future__ import annotations

import struct
from typing import Final

from kvstore.errors import IndexDamaged
from kvstore.kernel import crc32c

__all__ = ["FRAME_BYTES", "RECORD_VERSION", "frame", "unframe"]

# on disk: CRC32C of all that follows, record type, record version, key length; then the key; then the body
_HEAD = struct.Struct("<IBBH")
FRAME_BYTES: Final = _HEAD.size

RECORD_VERSION: Final = 1  # on disk


def frame(kind: int, key: bytes, body: bytes) -> bytes:
    """Wrap a record's body with its type, key and checksum."""
    covered = _HEAD.pack(0, kind, RECORD_VERSION, len(key))[4:] + key + body
    return crc32c(covered).to_bytes(4, "little") + covered


def unframe(kind: int, key: bytes, raw: bytes) -> int:
    """Check a record's envelope and return the offset at which its body starts.

    Raises
    ------
    IndexDamaged
        When the record is short, fails its checksum, or is of another type, version or key than asked for.
    """
    start = FRAME_BYTES + len(key)
    if len(raw) < start:
        raise IndexDamaged(f"a record of type {kind} has {len(raw)} bytes, expected at least {start}; verify the store")
    crc, found, version, key_bytes = _HEAD.unpack_from(raw)
    if crc != crc32c(raw[4:]):  # the copy costs less than a memoryview, even of the longest record
        raise IndexDamaged(f"the record of type {kind} under key {key.hex()} fails its checksum; verify the store")
    if found != kind or version != RECORD_VERSION or key_bytes != len(key) or raw[FRAME_BYTES:start] != key:
        raise IndexDamaged(
            f"asked for the record of type {kind} under key {key.hex()}, got type {found} version {version} "
            f"under {raw[FRAME_BYTES : FRAME_BYTES + key_bytes].hex()}; verify the store"
        )
    return start
