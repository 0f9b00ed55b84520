"""A hybrid model's session: attention rows in int8, pooled index keys, recurrent states, a window; and an engine that holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benches.sessions import Array, arrays_for, touched
from kvstore import Layout, State, Stream
from kvstore.tier import Captured, Restored

__all__ = ["Hybrid", "HybridEngine"]

_ATTENTION, _RECURRENT = 12, 36  # layers
_HEADS, _HEAD = 2, 256  # of keys and values in an attention layer
_POOLED, _INDEX = 64, 128  # positions of a row of the index, and its width
_KEYS, _KERNEL = 128, 4  # width of a recurrent head's keys and values; positions that a convolution sees
_WINDOW = 512
_STAMP = 4096


@dataclass(frozen=True, slots=True)
class Hybrid:
    """One model of this kind: what its recurrent layers hold decides how large a checkpoint is.

    Attributes
    ----------
    heads : int
        Of a recurrent layer. Its state has 128 x 128 numbers for each.
    dtype : str
        Of those numbers: ``f16`` or ``f32``.
    """

    heads: int
    dtype: str

    def layout(self) -> Layout:
        """12 layers of attention, 36 recurrent ones, one with a window of 512 positions."""
        streams: list[Stream] = []
        for layer in range(_ATTENTION):
            for part in "kv":
                streams += [Stream(f"{part}{layer}", "i8", (_HEADS, _HEAD)), Stream(f"{part}{layer}_scale", "f16", (_HEADS,))]
            streams.append(Stream(f"index{layer}", "f16", (_INDEX,), tokens_per_row=_POOLED))
        channels = 3 * self.heads * _KEYS
        states: list[State] = []
        for layer in range(_RECURRENT):
            states.append(State(f"recurrent{layer}", self.dtype, (self.heads, _KEYS, _KEYS)))
            states.append(State(f"convolution{layer}", "f16", (_KERNEL - 1, channels)))
        # the keys of an unfinished row of the index, and the window's rows: fewer than the most until there are so many
        states.append(State("index_tail", "f16", (_POOLED - 1, _ATTENTION, _INDEX), (0,)))
        states.append(State("window", "f16", (_WINDOW, 2, _HEADS, _KEYS), (0,)))
        return Layout(streams=tuple(streams), states=tuple(states), model=f"bench-hybrid-{self.heads}-{self.dtype}")

    def states(self, position: int, seed: int) -> dict[str, Array]:
        """All states at a position: random bytes, of which no 4 KiB are those of another position or seed."""
        extents = {"index_tail": position % _POOLED, "window": min(position, _WINDOW)}
        random = np.random.default_rng(3)
        made: dict[str, Array] = {}
        for number, state in enumerate(self.layout().states):
            shape = (extents.get(state.name, state.array_shape[0]), *state.array_shape[1:])
            size = int(np.prod(shape)) * state.view_dtype.itemsize
            raw = np.frombuffer(bytearray(random.bytes(size)), np.uint8)
            for byte, part in enumerate(np.array([position, seed, number], np.uint32).tobytes()):
                raw[byte::_STAMP] = part
            made[state.name] = raw.view(state.view_dtype).reshape(shape)
        return made


class HybridEngine:
    """One sequence of such a model; implements `kvstore.tier.Engine`. What it computes is random, and differs for each seed.

    Parameters
    ----------
    model : Hybrid
    capacity : int
        Positions that its arrays have room for.

    Attributes
    ----------
    streams, states : dict of str to ndarray
        What it holds, up to `position`. Whoever restores gives it other states.
    position : int
    """

    def __init__(self, model: Hybrid, capacity: int) -> None:
        self._model, self._layout = model, model.layout()
        self.streams = touched(self._layout, capacity)
        self.states: dict[str, Array] = {}
        self.position = 0

    def compute(self, length: int, seed: int) -> int:
        """Go on to a position; say how many bytes of rows that made. From the start of the unfinished row of the index on."""
        start = self.position - self.position % _POOLED
        made = arrays_for(self._layout, length - start, seed)
        size = 0
        for stream in self._layout.streams:
            first = stream.rows(self.position)
            rows = made[stream.name][first - stream.rows(start) :]
            self.streams[stream.name][first : stream.rows(length)] = rows
            size += rows.nbytes
        self.states = self._model.states(length, seed)
        self.position = length
        return size

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._layout

    def capture(self, start: int, stop: int) -> Captured:
        """See `Engine.capture`."""
        rows = {s.name: self.streams[s.name][s.rows(start) : s.rows(stop)] for s in self._layout.streams}
        return Captured(rows, self.states if stop == self.position else {})

    def apply(self, restored: Restored) -> None:
        """See `Engine.apply`."""
        restored.copy_into(self.streams)
        self.states = restored.states()
        self.position = restored.length

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.position = 0
        self.states = {}
