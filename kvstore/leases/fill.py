"""Copying leased blocks into arrays, every byte checked: the one engine under all copies of a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import ArrayError, BlockDamaged
from kvstore.kernel import Restored, Rows, Target, progress_set, read_error, restore, restore_chunks
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
        rows: Sequence[Rows] | Target,
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
        rows : sequence of Rows, or Target
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
        target = Target.of(rows)
        if not chosen or target.skipped.all():
            if progress is not None:
                progress[:] = 1
            return True
        located = self._located.part(chosen.start, chosen.stop)
        first = located.start - located.start[0]
        copied = np.zeros_like(first) if not used else located.used if tokens is None else np.minimum(located.used, tokens - first)
        return self._restore(
            located,
            target,
            first if used else copied,
            located.held,
            copied,
            direct=self._past_cache()[chosen.start : chosen.stop],
            progress=progress,
            stop=stop,
            threads=threads,
        )

    def chunks(
        self,
        targets: Sequence[Target],
        which: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        *,
        filled: npt.NDArray[np.int32],
        taken: npt.NDArray[np.int32],
        ahead: int,
        stop: npt.NDArray[np.int32],
        threads: int | None = None,
    ) -> bool:
        """Copy ranges of positions one after another, each into one of a few destinations as soon as that is free.

        Parameters
        ----------
        targets : sequence of Target
            Each as for `rows`.
        which : sequence of int
            The destination of each chunk.
        bounds : sequence of (int, int)
            The positions [start, stop) of each chunk, which starts at a block's boundary and where the one before it stops.
        filled, taken, ahead, stop, threads
            As for `kvstore.kernel.restore_chunks`.

        Returns
        -------
        bool
            False if it was stopped.

        Raises
        ------
        ArrayError, BlockDamaged, LeaseClosedError
            As `rows`.
        """
        if all(target.skipped.all() for target in targets):
            for chunk in range(len(bounds)):
                progress_set(filled, chunk, 1)
            return True
        block = self._scope.layout.block_tokens
        begin, end = bounds[0][0] // block, -(-bounds[-1][1] // block)
        located = self._located.part(begin, end)
        count = np.array([-(-stop // block) - start // block for start, stop in bounds])
        chunk_start, chunk_stop = (np.repeat(np.array(column, np.int64), count) for column in zip(*bounds, strict=True))
        with self._held():
            restored = restore_chunks(
                self._scope.store.environment.source,
                targets,
                np.array(which, np.uint32),
                np.cumsum(count).astype(np.uint64),
                located.offset.astype(np.uint64),
                located.start - chunk_start,
                located.held,
                np.minimum(located.used, chunk_stop - located.start),
                located.sums,
                direct=self._past_cache()[begin:end],
                filled=filled,
                taken=taken,
                ahead=ahead,
                stop=stop,
                threads=threads,
            )
        return self._checked(located, restored)

    def _past_cache(self) -> npt.NDArray[np.uint8]:
        """Which blocks are to be read past the page cache; asked once for a lease: it is restored once, in however many parts."""
        if self._direct is None:
            self._direct = self._scope.store.past_cache(self._located.ids)
        return self._direct

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
        self._restore(located, Target([row]), first, length, copied, direct=self._scope.store.past_cache(located.ids))

    def _restore(
        self,
        located: Located,
        target: Target,
        first: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        used: npt.NDArray[np.int64],
        *,
        direct: npt.NDArray[np.uint8],
        progress: npt.NDArray[np.int32] | None = None,
        stop: npt.NDArray[np.int32] | None = None,
        threads: int | None = None,
    ) -> bool:
        with self._held():
            restored = restore(
                self._scope.store.environment.source,
                target,
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
        return self._checked(located, restored)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """While a copy runs: its bytes stay in place, whatever ends the lease meanwhile."""
        self._pin.hold()
        try:
            yield
        except (ValueError, TypeError) as error:
            raise ArrayError(f"the destinations cannot be written: {error}") from error
        finally:
            self._pin.drop()

    def _checked(self, located: Located, restored: Restored | None) -> bool:
        """Note what was read and refuse what is damaged. False if the copy was stopped."""
        if restored is None:
            return False
        if (restored.read == 2).any():
            self._scope.store.was_read_past_cache(located.ids[i] for i in np.flatnonzero(restored.read == 2))
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
