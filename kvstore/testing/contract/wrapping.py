"""Between the tier and an engine: wrappers that note what `apply` raises, spoil a part of what it gets, or cut it off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, Paged, StreamArray
from kvstore.ids import TokenArray
from kvstore.layout import Layout, Stream
from kvstore.leases import Chunk
from kvstore.testing.in_order import chunks_in_order
from kvstore.tier import Captured, Engine, Restored

__all__ = ["STATES", "CutOff", "CutOffError", "Spoiled", "Wrapped", "rows_in"]

STATES = "states"

Wrap: TypeAlias = Callable[[Restored], Restored]


class Wrapped:
    """An engine as the tier sees it in a check. All calls go through; what `apply` is given goes through `wrap` first.

    Attributes
    ----------
    raised : Exception or None
        What the last `apply` raised: the tier counts it, logs it and starts clean.
    """

    def __init__(self, engine: Engine, wrap: Wrap | None = None) -> None:
        self._engine = engine
        self._wrap = wrap
        self.raised: Exception | None = None

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._engine.layout()

    def capture(self, start: int, stop: int) -> Captured:
        """See `Engine.capture`."""
        return self._engine.capture(start, stop)

    def apply(self, restored: Restored) -> None:
        """See `Engine.apply`."""
        self.raised = None
        try:
            self._engine.apply(restored if self._wrap is None else self._wrap(restored))
        except Exception as error:
            self.raised = error
            raise

    def reset(self) -> None:
        """See `Engine.reset`."""
        self._engine.reset()


class _Through:
    """A `Restored` that hands on what another one gives."""

    def __init__(self, restored: Restored) -> None:
        self._restored = restored

    @property
    def length(self) -> int:
        return self._restored.length

    @property
    def tokens(self) -> TokenArray:
        return self._restored.tokens

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        self._restored.copy_into(arrays, start=start, stop=stop)

    def chunks(self, chunks: Sequence[Chunk], *, ahead: int = 1) -> AbstractContextManager[Iterator[Chunk]]:
        return chunks_in_order(self, chunks)  # through `copy_into`, which is what a wrapper changes

    @property
    def states_bytes(self) -> int:
        return self._restored.states_bytes

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        return self._restored.states(into=into)


class Spoiled(_Through):
    """Copies the right bytes, and then puts others in the place of one part's.

    Parameters
    ----------
    restored : Restored
        What is stored.
    part : Stream or str
        The stream, or the state's name.
    instead : ndarray
        For a stream one row a line, uint8[rows, row_bytes]; for a state the array to hand out.
    """

    def __init__(self, restored: Restored, part: Stream | str, instead: Array) -> None:
        super().__init__(restored)
        self._part = part
        self._instead = instead

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        """See `Restored.copy_into`."""
        super().copy_into(arrays, start=start, stop=stop)
        if isinstance(self._part, Stream) and self._part.name in arrays:
            span = slice(self._part.rows(start), self._part.rows(self.length if stop is None else stop))
            put_rows(self._part, arrays[self._part.name], self._instead[span])

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """See `Restored.states`."""
        states = super().states(into=into)
        if isinstance(self._part, str):
            states[self._part] = self._instead.copy()
        return states


class CutOffError(RuntimeError):
    """What `CutOff` raises, as if a device had failed."""


class CutOff(_Through):
    """Raises half-way through one stream, or when it is asked for the states; what comes before in the layout is copied.

    Where a stream is taken in ranges of positions, the one that holds the middle position is cut off in its middle row.

    Attributes
    ----------
    reached : bool
        Whether it has raised.
    """

    def __init__(self, restored: Restored, layout: Layout, part: str) -> None:
        super().__init__(restored)
        self._names = [stream.name for stream in layout.streams]
        self._streams = {stream.name: stream for stream in layout.streams}
        self._part = part
        self.reached = False

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        """See `Restored.copy_into`."""
        end = self.length if stop is None else stop
        if self._part not in arrays or not start <= self.length // 2 < end:
            super().copy_into(arrays, start=start, stop=stop)
            return
        before = set(self._names[: self._names.index(self._part) + 1])
        super().copy_into({name: array for name, array in arrays.items() if name in before}, start=start, stop=stop)
        stream = self._streams[self._part]
        rows = stream.rows(end) - stream.rows(start)
        garbage = np.full((rows - rows // 2, stream.row_bytes), 0x5A, np.uint8)
        put_rows(stream, arrays[self._part], garbage, first=rows // 2)
        self._raise()

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """See `Restored.states`."""
        if self._part == STATES:
            self._raise()
        return super().states(into=into)

    def _raise(self) -> None:
        self.reached = True
        raise CutOffError(f"cut off by the contract suite at {self._part}")


def put_rows(stream: Stream, array: StreamArray, rows: Array, *, first: int = 0) -> None:
    """Write bytes over rows of an engine's array. `rows` is uint8[n, row_bytes]; they go to rows [first, first + n)."""
    count = len(rows)
    if not count:
        return
    shape = stream.array_shape(stream.tokens_per_row)
    one = (*shape[: stream.token_axis], *shape[stream.token_axis + 1 :])
    shaped = np.ascontiguousarray(rows).view(stream.view_dtype).reshape(count, *one)
    if isinstance(array, Paged):
        pages = np.moveaxis(array.pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
        page, place = np.divmod(np.asarray(array.slots)[first : first + count], pages.shape[1])
        pages[page, place] = shaped.view(pages.dtype)
    else:
        np.moveaxis(array, stream.token_axis, 0)[first : first + count] = shaped.view(array.dtype)


def rows_in(stream: Stream, array: StreamArray, count: int) -> Array:
    """Copy the first rows out of an engine's array: uint8[count, row_bytes]."""
    if isinstance(array, Paged):
        pages = np.moveaxis(array.pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
        page, place = np.divmod(np.asarray(array.slots)[:count], pages.shape[1])
        rows = pages[page, place]
    else:
        rows = np.moveaxis(array, stream.token_axis, 0)[:count]
    flat: Array = np.array(rows, order="C").reshape(-1).view(np.uint8).reshape(len(rows), stream.row_bytes)
    return flat
