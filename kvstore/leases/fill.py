"""Copying leased blocks into arrays, every byte checked: the one engine under all copies of a lease."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import ArrayError, BlockDamaged
from kvstore.kernel import Rows, read_error, restore
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
    states : Located
        The blocks of its states.
    """

    def __init__(self, scope: NamespaceScope, pin: Pin, located: Located, states: Located) -> None:
        self._scope = scope
        self._pin = pin
        self._located = located
        self._states = states
        self._direct: npt.NDArray[np.uint8] | None = None

    def rows(
        self,
        rows: Sequence[Rows],
        *,
        blocks: slice = slice(None),
        tokens: int | None = None,
        used: bool = True,
        progress: npt.NDArray[np.int32] | None = None,
        stop: npt.NDArray[np.int32] | None = None,
        threads: int | None = None,
    ) -> bool:
        """Copy rows of some blocks, or all, into the caller's memory, and check the segments of every stream not skipped.

        Parameters
        ----------
        rows : sequence of Rows
            One for each stream of the layout, in its order; `Rows.skip` for those that are not wanted.
        blocks : slice
            Which blocks of the lease, by index, without a step. Row 0 of the arrays is the first row of the first of them.
        tokens : int, optional
            How many positions to copy, counted from the start of the first of these blocks; by default all that the lease has of
            them. The last block is checked whole even so.
        used : bool
            False checks without copying anything; the arrays then need room for one row.
        progress, stop : int32 array, optional
            As for `kvstore.kernel.restore`: what tells other threads which streams are in place, and what stops the copy.
        threads : int, optional
            Threads to copy with; by default one for each processor, at most 8. The GIL is released.

        Returns
        -------
        bool
            False if it was stopped; what was written is undefined then.

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
            if progress is not None:
                progress[:] = 1
            return True
        located = self._located.part(chosen.start, chosen.stop)
        first = located.start - located.start[0]
        copied = np.zeros_like(first) if not used else located.used if tokens is None else np.minimum(located.used, tokens - first)
        if self._direct is None:
            # once for the lease: what is copied stream by stream is restored once, not as often as there are streams
            self._direct = self._scope.store.past_cache(self._located.ids)
        return self._restore(
            located,
            rows,
            first if used else copied,
            located.held,
            copied,
            direct=self._direct[chosen.start : chosen.stop],
            progress=progress,
            stop=stop,
            threads=threads,
        )

    def states(self, into: npt.NDArray[np.uint8] | None) -> None:
        """Check the blocks of states, all of them, and copy their payloads one behind the other if a destination is given.

        Raises as `rows`.
        """
        located = self._states
        if not len(located):
            return
        length = located.payload_bytes
        end = np.cumsum(length)
        none = np.zeros_like(length)
        row = Rows.strided(np.empty(1, np.uint8) if into is None else into, axis=0)
        if into is not None and int(end[-1]) != into.nbytes:
            raise self.damaged(located, 0, f"the blocks of the checkpoint hold {end[-1]} bytes, it has {into.nbytes}")
        first, copied = (none, none) if into is None else (end - length, length)
        self._restore(located, [row], first, length, copied, direct=self._scope.store.past_cache(located.ids))

    def _restore(
        self,
        located: Located,
        rows: Sequence[Rows],
        first: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        used: npt.NDArray[np.int64],
        *,
        direct: npt.NDArray[np.uint8],
        progress: npt.NDArray[np.int32] | None = None,
        stop: npt.NDArray[np.int32] | None = None,
        threads: int | None = None,
    ) -> bool:
        store = self._scope.store
        self._pin.hold()  # the bytes stay in place until the copy is done, whatever ends the lease meanwhile
        try:
            restored = restore(
                store.environment.source,
                rows,
                located.offset.astype(np.uint64),
                first,
                tokens,
                used,
                located.sums,
                direct=direct,
                progress=progress,
                stop=stop,
                threads=threads,
            )
        except (ValueError, TypeError) as error:
            raise ArrayError(f"the destinations cannot be written: {error}") from error
        finally:
            self._pin.drop()
        if restored is None:
            return False
        if (restored.read == 2).any():
            store.was_read_past_cache(located.ids[i] for i in np.flatnonzero(restored.read == 2))
        if not restored.sound:
            self._refuse(located, restored.errors, restored.failed)
        return True

    def _refuse(self, located: Located, errors: npt.NDArray[np.int32], failed: npt.NDArray[np.int32]) -> None:
        """Refuse all blocks that failed, and raise the error of the first."""
        wrong = np.flatnonzero((errors != 0) | (failed >= 0)).tolist()
        for index in wrong[1:]:
            self._scope.store.refuse(located.ids[index], int(located.offset[index]))
        worst = wrong[0]
        if errors[worst]:
            raise self.damaged(located, worst, f"its bytes cannot be read: {read_error(int(errors[worst]))}")
        if located is self._states:
            raise self.damaged(located, worst, "the checksum of the states is wrong")
        name = self._scope.layout.streams[int(failed[worst])].name
        raise self.damaged(located, worst, f"the checksum of stream {name!r} is wrong")

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
