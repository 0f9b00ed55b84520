"""The header of a block, the record that counts its references, and the note that it is bad.

A block's value is the header, padded so that the payload starts on a 4 KiB boundary of the file, then the payload, then
zeros up to one of a few sizes. LMDB puts a large value 16 bytes behind the start of a page, hence 4,080 bytes of header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.kernel import crc32c
from kvstore.records.constants import (
    BLOCK_MAGIC,
    FORMAT_VERSION,
    PAGE_HEADER,
    PAYLOAD_ALIGN,
    TAIL_SIZES,
    inline_limit,
)
from kvstore.records.frame import frame, unframe

__all__ = ["REF_TYPE", "BadRecord", "BlockHeader", "Geometry", "Ref", "header_bytes"]

# record types; on disk
REF_TYPE: Final = 7
_BAD: Final = 8

# on disk: magic, format version, kind, header bytes, block id, namespace id, tokens, sums, payload bytes
_HEADER = struct.Struct("<8sHBxI32s32sIIQ")
# on disk: count, kind, pages, payload's file offset, payload bytes, tokens
_REF_BODY = struct.Struct("<IB3xIQQI4x")
_BAD_BODY = struct.Struct("<Q")
_CRC_BYTES = 4


def header_bytes(sums: int) -> int:
    """Bytes that a header with this many checksums takes in a value: up to a 4 KiB boundary of the file."""
    used = PAGE_HEADER + _HEADER.size + 4 * sums + _CRC_BYTES
    return -(-used // PAYLOAD_ALIGN) * PAYLOAD_ALIGN - PAGE_HEADER


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the blocks of one layout in files of one page size.

    Attributes
    ----------
    page_bytes : int
        LMDB's page size.
    sizes : tuple of int
        The numbers of pages that values take, ascending: those of `TAIL_SIZES` equal parts of a full payload. So a freed
        tail's run fits the next one, and a full block's fits any.
    """

    page_bytes: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, page_bytes: int, sums: int, payload_bytes: int) -> Geometry:
        """Geometry of a size class whose largest block has this many checksums and payload bytes."""
        head = PAGE_HEADER + header_bytes(sums)
        least = -(-(PAGE_HEADER + inline_limit(page_bytes, ID_BYTES) + 1) // page_bytes)
        parts = (-(-payload_bytes * part // TAIL_SIZES) for part in range(1, TAIL_SIZES + 1))
        return cls(page_bytes, tuple(sorted({max(-(-(head + part) // page_bytes), least) for part in parts})))

    @property
    def full_pages(self) -> int:
        """Pages of a block of the layout's size class."""
        return self.sizes[-1]

    def value_bytes(self, header: int, payload_bytes: int) -> int:
        """Length of the value that holds a header of `header` bytes and a payload, padding included.

        It fills its pages (LMDB writes whole pages anyhow) and is always past LMDB's inline limit, so that it never lies
        inside a leaf page.
        """
        least = max(PAGE_HEADER + header + payload_bytes, PAGE_HEADER + inline_limit(self.page_bytes, ID_BYTES) + 1)
        needed = -(-least // self.page_bytes)
        pages = next((size for size in self.sizes if size >= needed), needed)
        return pages * self.page_bytes - PAGE_HEADER

    def pages(self, value_bytes: int) -> int:
        """Pages that a value of this length takes."""
        return -(-(PAGE_HEADER + value_bytes) // self.page_bytes)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block says of itself.

    Attributes
    ----------
    kind : int
        KIND_ROWS or KIND_STATES.
    block_id, namespace : bytes
        32 bytes each.
    tokens : int
        Positions that the block holds rows for; 0 for a block of states.
    payload_bytes : int
        Length of the payload.
    sums : ndarray
        uint32, one CRC32C for each stream's segment (one over all of it, for a block of states).
    """

    kind: int
    block_id: bytes
    namespace: bytes
    tokens: int
    payload_bytes: int
    sums: np.ndarray[tuple[int], np.dtype[np.uint32]]

    @property
    def padded_bytes(self) -> int:
        """Bytes in a value in front of the payload."""
        return header_bytes(len(self.sums))

    def encode(self) -> bytes:
        """Encode without the padding; ends with the header's own CRC32C."""
        head = _HEADER.pack(
            BLOCK_MAGIC,
            FORMAT_VERSION,
            self.kind,
            self.padded_bytes,
            self.block_id,
            self.namespace,
            self.tokens,
            len(self.sums),
            self.payload_bytes,
        )
        head += self.sums.astype("<u4").tobytes()
        return head + crc32c(head).to_bytes(_CRC_BYTES, "little")

    @staticmethod
    def encoded_bytes(sums: int) -> int:
        """Length of an encoded header with this many checksums."""
        return _HEADER.size + 4 * sums + _CRC_BYTES

    @classmethod
    def decode(cls, raw: bytes) -> BlockHeader:
        """Decode the beginning of a value; raises IndexDamaged."""
        if len(raw) < _HEADER.size + _CRC_BYTES or not raw.startswith(BLOCK_MAGIC):
            raise IndexDamaged("no block header at the offset where one was expected")
        _, version, kind, padded, block_id, namespace, tokens, sums, payload_bytes = _HEADER.unpack_from(raw)
        length = _HEADER.size + 4 * sums
        if version != FORMAT_VERSION or length + _CRC_BYTES > len(raw) or padded != header_bytes(sums):
            raise IndexDamaged(f"a block header does not parse: version {version}, {sums} sums, {padded} bytes")
        if crc32c(raw[:length]) != int.from_bytes(raw[length : length + _CRC_BYTES], "little"):
            raise IndexDamaged(f"the header of block {block_id.hex()} fails its checksum")
        found = np.frombuffer(raw, dtype="<u4", count=sums, offset=_HEADER.size)
        return cls(kind, block_id, namespace, tokens, payload_bytes, found)


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a block lies and how many index records refer to it.

    Attributes
    ----------
    count : int
        References from nodes (blocks, tails, checkpoints).
    kind : int
        As in the block's header.
    pages : int
        LMDB pages that the value takes.
    offset : int
        Offset of the payload in the data file, a multiple of 4 KiB. Holds within one file generation.
    payload_bytes, tokens : int
        As in the block's header.
    """

    count: int
    kind: int
    pages: int
    offset: int
    payload_bytes: int
    tokens: int

    def counted(self, change: int) -> Ref:
        """The same with another count."""
        return replace(self, count=self.count + change)

    def encode(self, block_id: bytes) -> bytes:
        """Encode as the value of `refs` under the block's id."""
        body = _REF_BODY.pack(self.count, self.kind, self.pages, self.offset, self.payload_bytes, self.tokens)
        return frame(REF_TYPE, block_id, body)

    @classmethod
    def decode(cls, block_id: bytes, raw: bytes) -> Ref:
        """Decode; raises IndexDamaged."""
        start = unframe(REF_TYPE, block_id, raw)
        if len(raw) != start + _REF_BODY.size:
            raise IndexDamaged(f"the reference record of block {block_id.hex()} has {len(raw)} bytes")
        return cls(*_REF_BODY.unpack_from(raw, start))


@dataclass(frozen=True, slots=True)
class BadRecord:
    """The note that a block failed its checks: it is refused until a save produces it anew."""

    noticed: int  # microseconds since the epoch

    def encode(self, block_id: bytes) -> bytes:
        """Encode as the value of `bad` under the block's id."""
        return frame(_BAD, block_id, _BAD_BODY.pack(self.noticed))
