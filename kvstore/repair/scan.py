"""One pass over a damaged file: where blocks begin, and which pages look like leaves of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.env.damaged import DamagedFile
from kvstore.errors import IndexDamaged
from kvstore.records.block import BlockHeader
from kvstore.records.constants import BLOCK_MAGIC, PAGE_HEADER, PAYLOAD_ALIGN

__all__ = ["Found", "Place", "scan_file"]

_PIECE = 8 << 20  # a multiple of every page size
_LEAF = 0x02  # flags of LMDB 0.9's page header
_WORDS = PAYLOAD_ALIGN // 8
_HEADER_AT = PAGE_HEADER // 8
_MAGIC = np.frombuffer(BLOCK_MAGIC, "<u8")[0]
_LONGEST_HEADER = 128 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block with a whole header lies. Whether its payload is what its id says is seen when it is read."""

    value: int
    header: BlockHeader

    @property
    def payload(self) -> int:
        """Offset of the payload in the file."""
        return self.value + self.header.padded_bytes


@dataclass(slots=True)
class Found:
    """What a scan found.

    Attributes
    ----------
    blocks : dict of bytes to list of Place
        By block id. Copies of one block are equally good, wherever they lie.
    leaves : dict of int to ndarray
        For each page size, the numbers of the pages that say they are leaf pages.
    """

    blocks: dict[bytes, list[Place]] = field(default_factory=dict)
    leaves: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)


def scan_file(file: DamagedFile, page_sizes: tuple[int, ...], progress: Callable[[str, int, int], None] | None) -> Found:
    """Read a file from end to end, in large pieces."""
    found = Found()
    leaves: dict[int, list[npt.NDArray[np.int64]]] = {size: [] for size in page_sizes}
    buffer = np.zeros(_PIECE, np.uint8)
    for at in range(0, file.size, _PIECE):
        if progress is not None:
            progress("reading", at >> 20, file.size >> 20)
        length = file.read_into(at, buffer.data)
        words = buffer[: length // PAYLOAD_ALIGN * PAYLOAD_ALIGN].view("<u8").reshape(-1, _WORDS)
        for index in np.flatnonzero(words[:, _HEADER_AT] == _MAGIC).tolist():
            _note_block(file, found, at + index * PAYLOAD_ALIGN + PAGE_HEADER)
        for size in page_sizes:
            heads = words[:: size // PAYLOAD_ALIGN]
            numbers = at // size + np.arange(len(heads), dtype=np.int64)
            flags = (heads[:, 1] >> np.uint64(16)) & np.uint64(0xFFFF)
            leaves[size].append(numbers[(heads[:, 0] == numbers.astype(np.uint64)) & (flags == _LEAF)])
    found.leaves = {size: np.concatenate(parts) if parts else np.zeros(0, np.int64) for size, parts in leaves.items()}
    return found


def _note_block(file: DamagedFile, found: Found, value: int) -> None:
    for length in (PAYLOAD_ALIGN, _LONGEST_HEADER):
        try:
            header = BlockHeader.decode(file.read(value, length))
        except IndexDamaged:
            continue
        place = Place(value, header)
        if place.payload % PAYLOAD_ALIGN == 0 and place.payload + header.payload_bytes <= file.size:
            found.blocks.setdefault(header.block_id, []).append(place)
        return
