"""Kinds of `HashEngine` that are not broken: what engines may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kvstore import Captured, Chunk, HostBuffer, Layout, Paged, Restored
from kvstore.arrays import StreamArray
from kvstore.testing import HashEngine


class HandsOutViews(HashEngine):
    """Hands out views of its own arrays, which are overwritten when it reads on."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        streams = {
            s.name: self.streams[s.name][(slice(None),) * s.token_axis + (slice(s.rows(start), s.rows(stop)),)]
            for s in self._layout.streams
        }
        return Captured(streams, self.states if stop == self.position else {})


class PartByPart(HashEngine):
    """Takes one stream after another, the states first."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        self.states = restored.states()
        for name, array in self.streams.items():
            restored.copy_into({name: array})
        self.position = restored.length
        self._reread()


class InRanges(HashEngine):
    """Takes its rows in ranges of a block, the last one first, through a buffer of that size; the states in between."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        size = self._layout.block_tokens
        for start in reversed(range(0, restored.length, size)):
            stop = min(start + size, restored.length)
            buffers = {s.name: np.zeros(s.array_shape(size), s.view_dtype) for s in self._layout.streams}
            restored.copy_into(buffers, start=start, stop=stop)
            for stream in self._layout.streams:
                span = slice(stream.rows(start), stream.rows(stop))
                rows = np.moveaxis(buffers[stream.name], stream.token_axis, 0)
                self._rows(stream.name, stream.token_axis)[span] = rows[: span.stop - span.start]
            if stop == restored.length:
                self.states = restored.states()
        self.position = restored.length
        self._reread()


class InChunks(HashEngine):
    """Takes its rows in chunks of a block through two buffers, by turns, and the states at the end."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        with restored.chunks(self.cut(restored.length)) as filled:
            for chunk in filled:
                self.take(chunk)
        self.states = restored.states()
        self.position = restored.length
        self._reread()

    def cut(self, length: int) -> list[Chunk]:
        """What it asks for."""
        layout, size = self._layout, self._layout.block_tokens
        shapes = {s.name: (s.array_shape(size), s.view_dtype) for s in layout.streams}
        ring = [HostBuffer(layout, {n: np.zeros(*given) for n, given in shapes.items()}, size) for _ in range(2)]
        return [Chunk(start, min(start + size, length), ring[i % 2]) for i, start in enumerate(range(0, length, size))]

    def take(self, chunk: Chunk) -> None:
        """Copy a chunk to where it belongs."""
        for stream in self._layout.streams:
            span = slice(stream.rows(chunk.start), stream.rows(chunk.stop))
            array = chunk.buffer.arrays[stream.name]
            assert isinstance(array, np.ndarray)
            rows = np.moveaxis(array, stream.token_axis, 0)
            self._rows(stream.name, stream.token_axis)[span] = rows[: span.stop - span.start]


class InPages(HashEngine):
    """Keeps the rows of its device in pages of three, back to front, and hands those out and takes those."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._paged: dict[str, Paged] = {}
        for stream in layout.streams:
            rows = self.streams[stream.name].shape[stream.token_axis]
            count = -(-rows // 3)
            shape = stream.array_shape(stream.tokens_per_row)
            shape = (*shape[: stream.token_axis], count, 3, *shape[stream.token_axis + 1 :])
            slots = np.arange(3 * count)[::-1][:rows].copy()
            self._paged[stream.name] = Paged(np.zeros(shape, stream.view_dtype), slots)

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        arrays: dict[str, Any] = dict(captured.streams)
        streams: dict[str, StreamArray] = {}
        for stream in self._layout.streams:
            paged = self._paged[stream.name]
            span = paged.slots[stream.rows(start) : stream.rows(stop)]
            pages = np.moveaxis(paged.pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
            pages[span // 3, span % 3] = np.moveaxis(arrays[stream.name], stream.token_axis, 0)
            streams[stream.name] = replace(paged, slots=span)
        return replace(captured, streams=streams)

    def apply(self, restored: Restored) -> None:
        """See the class."""
        restored.copy_into(self._paged)
        for stream in self._layout.streams:
            paged = self._paged[stream.name]
            span = paged.slots[: stream.rows(restored.length)]
            pages = np.moveaxis(paged.pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
            np.moveaxis(self.streams[stream.name], stream.token_axis, 0)[: span.size] = pages[span // 3, span % 3]
        self.states = restored.states()
        self.position = restored.length
        self._reread()


class ExtensionTypes(HashEngine):
    """Its arrays are of ml_dtypes' types, which numpy itself doesn't know."""

    def typed(self) -> dict[str, Any]:
        """Its streams and states: the same bytes in those types."""
        return {name: _typed(array) for name, array in {**self.streams, **self.states}.items()}

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        streams, states = ({k: _typed(v) for k, v in named.items()} for named in (dict(captured.streams), captured.states))
        return Captured(streams, states)

    def apply(self, restored: Restored) -> None:
        """See the class."""
        restored.copy_into({name: _typed(array) for name, array in self.streams.items()})
        self.states = restored.states()
        self.position = restored.length
        self._reread()


def _typed(array: Any) -> Any:
    return array.view(ml_dtypes.bfloat16 if array.dtype == np.uint16 else ml_dtypes.float8_e4m3fn)
