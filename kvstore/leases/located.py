"""Where the blocks of a lease lie: looked up in the index, their headers read and checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore import blocks as table
from kvstore.errors import BlockDamaged, IndexDamaged
from kvstore.leases.match import Found
from kvstore.leases.pin import Pin
from kvstore.scope import NamespaceScope

__all__ = ["Located", "locate_rows", "locate_states"]


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Blocks as a lease keeps them, in order of position: columns, since one object a block would cost more than reading it.

    It has no reference to the lease, so that no cycle delays the end of its transaction.

    Attributes
    ----------
    ids : list of bytes
        32 bytes each.
    start : int64 array
        Position of each block's first row.
    used : int64 array
        Positions of it that belong to the lease.
    held : int64 array
        Positions that it holds rows for; more than `used` where the lease ends inside it. 0 for states.
    offset : int64 array
        File offset of the payload, a multiple of 4 KiB.
    payload_bytes : int64 array
        Length of the payload.
    sums : uint32 array of shape (blocks, sums of each)
        CRC32C of each stream's segment; of the whole, for states.
    """

    ids: list[bytes]
    start: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    payload_bytes: npt.NDArray[np.int64]
    sums: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Located:
        """Some neighbouring blocks of these."""
        if start == 0 and stop == len(self.ids):
            return self
        part = slice(start, stop)
        return Located(
            self.ids[part],
            self.start[part],
            self.used[part],
            self.held[part],
            self.offset[part],
            self.payload_bytes[part],
            self.sums[part],
        )


def locate_rows(scope: NamespaceScope, pin: Pin, found: Found) -> Located:
    """Look up the blocks that hold the rows of a prefix.

    Raises
    ------
    BlockDamaged
        With the position, for the first block that is missing or whose header isn't the one that was stored.
    """
    layout = scope.layout
    ids = found.blocks(layout.block_tokens)
    start = np.arange(len(ids), dtype=np.int64) * layout.block_tokens
    located = _locate(scope, pin, ids, start, np.minimum(layout.block_tokens, found.length - start), len(layout.streams))
    for index, block_id in enumerate(ids):
        held, used = int(located.held[index]), int(located.used[index])
        if held < used or located.payload_bytes[index] != layout.payload_bytes(held):
            raise BlockDamaged(
                f"block {block_id.hex()} holds {held} positions, the index says at least {used}",
                block_id=block_id,
                position=int(start[index]),
                offset=int(located.offset[index]),
            )
    return located


def locate_states(scope: NamespaceScope, pin: Pin, found: Found) -> Located:
    """Look up the blocks of the states of a prefix; none for a layout without states. Raises as `locate_rows`."""
    ids = [] if found.checkpoint is None else list(found.checkpoint.ids)
    position = found.checkpoint.position if found.checkpoint is not None else 0
    none = np.zeros(len(ids), np.int64)
    return _locate(scope, pin, ids, none + position, none, 1)


def _locate(
    scope: NamespaceScope, pin: Pin, ids: list[bytes], start: npt.NDArray[np.int64], used: npt.NDArray[np.int64], sums: int
) -> Located:
    held, offset, payload_bytes = (np.empty(len(ids), np.int64) for _ in range(3))
    found_sums = np.empty((len(ids), sums), np.uint32)
    for index, block_id in enumerate(ids):
        try:
            ref = table.find(pin.reader, block_id)
            if ref is None:
                raise table.missing(block_id)
        except IndexDamaged as error:
            raise BlockDamaged(str(error), block_id=block_id, position=int(start[index])) from error
        try:
            header = table.read_header(scope.store.environment, block_id, ref, sums, scope.namespace)
        except BlockDamaged as error:
            error.position = int(start[index])
            raise
        held[index], offset[index], payload_bytes[index] = header.tokens, ref.offset, header.payload_bytes
        found_sums[index] = header.sums
    return Located(ids, start, used, held, offset, payload_bytes, found_sums)
