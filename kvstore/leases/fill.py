"""Copying leased blocks into arrays, every byte checked: the one engine under all copies of a lease."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import ArrayError, BlockDamaged
from kvstore.kernel import Rows, crc32c, scatter
from kvstore.leases.located import Located
from kvstore.leases.pin import Pin
from kvstore.scope import NamespaceScope

__all__ = ["Filler"]


class Filler:
    """Copies out of the blocks of one lease. Holds no reference to the lease. Thread-safe.

    Parameters
    ----------
    scope : NamespaceScope
        Where the blocks belong.
    pin : Pin
        What keeps the bytes in place; each call holds it until it is done.
    located : Located
        The lease's blocks of rows.
    """

    def __init__(self, scope: NamespaceScope, pin: Pin, located: Located) -> None:
        self._scope = scope
        self._pin = pin
        self._located = located

    def rows(self, rows: Sequence[Rows], *, blocks: slice = slice(None), used: bool = True, threads: int | None = None) -> None:
        """Copy rows of some blocks, or all, into the caller's memory, and check the segments of every stream not skipped.

        Parameters
        ----------
        rows : sequence of Rows
            One for each stream of the layout, in its order; `Rows.skip` for those that are not wanted.
        blocks : slice
            Which blocks of the lease, by index. Row 0 of the arrays is the first row of the first of them.
        used : bool
            False checks without copying anything; the arrays then need room for one row.
        threads : int, optional
            Threads to copy with; by default one for each processor, at most 8. The GIL is released.

        Raises
        ------
        ArrayError
            When the memory can't be written, before a byte moves.
        BlockDamaged
            When a byte isn't what was saved. What was written is undefined then; the block is refused from now on.
        LeaseClosedError
            When the pin has gone.
        """
        chosen = range(len(self._located))[blocks]
        if not chosen or all(r.skipped for r in rows):
            return
        self._pin.hold()  # the bytes stay in place until the copy is done, whatever ends the lease meanwhile
        try:
            self._rows(rows, chosen, used, threads)
        finally:
            self._pin.drop()

    def _rows(self, rows: Sequence[Rows], chosen: range, used: bool, threads: int | None) -> None:
        located, part = self._located, slice(chosen.start, chosen.stop, chosen.step)
        first = located.start[part] - located.start[chosen.start]
        addresses = np.array([self._address(located, index) for index in chosen], np.uint64)
        try:
            failed = scatter(
                rows,
                addresses,
                first if used else np.zeros_like(first),
                located.held[part],
                located.used[part] if used else np.zeros_like(first),
                located.sums[part],
                threads=threads,
            )
        except (ValueError, TypeError) as error:
            raise ArrayError(f"the destinations cannot be written: {error}") from error
        wrong = np.flatnonzero(failed >= 0)
        if wrong.size:
            for index in wrong[1:]:
                at = chosen[int(index)]
                self._scope.store.refuse(located.ids[at], int(located.offset[at]))
            worst = int(wrong[0])
            name = self._scope.layout.streams[int(failed[worst])].name
            raise self.damaged(located, chosen[worst], f"the checksum of stream {name!r} is wrong")

    def whole(self, located: Located, index: int, into: npt.NDArray[np.uint8] | None) -> None:
        """Check the one checksum of a block of states, and copy its payload if a destination is given."""
        self._address(located, index)
        payload = self._pin.view(int(located.offset[index]), int(located.payload_bytes[index]))
        if into is not None:
            into[:] = payload
            payload = into
        if crc32c(payload) != int(located.sums[index, 0]):
            raise self.damaged(located, index, "the checksum of the states is wrong")

    def _address(self, located: Located, index: int) -> int:
        try:
            return self._scope.store.environment.payload_address(int(located.offset[index]), int(located.payload_bytes[index]))
        except OSError as error:
            raise self.damaged(located, index, f"its bytes cannot be read: {error}") from error

    def damaged(self, located: Located, index: int, why: str) -> BlockDamaged:
        """Refuse a block from now on; returns the error to raise."""
        block_id, offset, position = located.ids[index], int(located.offset[index]), int(located.start[index])
        self._scope.store.refuse(block_id, offset)
        return BlockDamaged(
            f"block {block_id.hex()} at position {position}: {why}; it is refused from now on",
            block_id=block_id,
            position=position,
            offset=offset,
        )
