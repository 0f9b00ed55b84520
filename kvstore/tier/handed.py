"""What an engine's `apply` is given, and whether it took all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, StreamArray
from kvstore.errors import BlockDamaged, EngineError
from kvstore.ids import TokenArray
from kvstore.layout import Layout
from kvstore.leases import Chunk, Chunks, Lease

__all__ = ["Handed"]


class Handed:
    """A lease behind the `Restored` protocol, noting what was taken.

    Parameters
    ----------
    lease : Lease
        The prefix.
    layout : Layout
        What has to be taken of it: all rows that it has of every stream, and the states.
    """

    def __init__(self, lease: Lease, layout: Layout) -> None:
        self._lease = lease
        self._layout = layout
        # ranges of positions by stream, in the order in which they were taken; those that follow one another are one
        self._taken: dict[str, list[tuple[int, int]]] = {stream.name: [] for stream in layout.streams}
        self._states_left = bool(layout.states)
        self._damage: BlockDamaged | None = None
        self.length = lease.length
        self.tokens: TokenArray = lease.tokens

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        """See `Restored.copy_into`."""
        stop = self.length if stop is None else stop
        try:
            self._lease.copy_into(arrays, start=start, stop=stop)
        except BlockDamaged as error:
            self._damage = error
            raise
        self._note(arrays, start, stop)

    @contextlib.contextmanager
    def chunks(self, chunks: Sequence[Chunk], *, ahead: int = 1) -> Iterator[Iterator[Chunk]]:
        """See `Restored.chunks`."""
        given: list[Chunk] = []
        try:
            with self._lease.chunks(chunks, ahead=ahead) as filled:
                yield self._given(filled, given)
        finally:
            if given:  # they follow one another and have the same streams
                self._note(given[0].buffer.arrays, given[0].start, given[-1].stop)

    def _given(self, filled: Chunks, given: list[Chunk]) -> Iterator[Chunk]:
        try:
            for chunk in filled:
                given.append(chunk)
                yield chunk
        except BlockDamaged as error:
            self._damage = error
            raise

    def _note(self, names: Iterable[str], start: int, stop: int) -> None:
        """Rows of these positions are in the engine's hands."""
        for name in names:
            taken = self._taken[name]
            if taken and taken[-1][1] == start:
                start_before, _ = taken.pop()
                taken.append((start_before, stop))
            else:
                taken.append((start, stop))

    @property
    def states_bytes(self) -> int:
        """See `Restored.states_bytes`."""
        return self._lease.states_bytes

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """See `Restored.states`."""
        try:
            states = self._lease.states(into=into)
        except BlockDamaged as error:
            self._damage = error
            raise
        self._states_left = False
        return states

    def check_taken(self) -> None:
        """Refuse, with EngineError, an engine that has not taken everything."""
        if self._damage is not None:
            raise EngineError(
                "the engine went on after it was told of damaged bytes: `apply` must let the error pass"
            ) from self._damage
        left = [self._left(stream.name, stream.tokens_per_row) for stream in self._layout.streams]
        what = sorted(filter(None, left)) + (["states"] if self._states_left else [])
        if what:
            raise EngineError(
                f"the engine took a restored prefix without {what}: it would go on with a mixture. "
                "`apply` must copy every stream, all positions of it, and take the states, if the layout has any"
            )

    def _left(self, name: str, tokens_per_row: int) -> str:
        """What of a stream was not taken, for the error; empty if nothing."""
        end = self.length // tokens_per_row * tokens_per_row  # what lies behind is part of no row
        reached = 0
        for start, stop in sorted(self._taken[name]):
            if start > reached:
                return f"{name} [{reached}, {start})"
            reached = max(reached, stop // tokens_per_row * tokens_per_row)
        if reached >= end:
            return ""
        return f"{name} [{reached}, {end})" if reached else name
