"""A synthetic engine: every row and state is a hash of everything that the engine has read so far."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from kvstore.ids import Tokens, as_tokens
from kvstore.layout import Layout, StateHash, state_hash
from kvstore.testing.expiring import STALE, Expiring, fill
from kvstore.testing.sessions import Array, state_shape
from kvstore.tier import Captured, Restored

__all__ = ["HashEngine"]


class HashEngine:
    """One sequence whose bytes all depend on each other; implements `kvstore.tier.Engine`.

    What position p adds (a row of each stream whose span ends there, and every state) is expanded from a hash over all rows
    below p, all states at p and the token. So one byte that is missing, stale or of another session changes every later row,
    and comparing `state_hash` with that of an engine which was never interrupted finds it.

    It is strict with whoever uses it: the arrays of a `capture` are overwritten at the engine's next call.

    Parameters
    ----------
    layout : Layout
        Any layout in which a token leaves a trace at once: a stream with one row a token, or a state.
    capacity : int
        Positions that the arrays have room for.

    Attributes
    ----------
    position : int
        How many tokens the engine has read: its next token goes there.
    streams : dict of str to ndarray
        The engine's arrays. Rows from `position` on hold whatever was there before.
    states : dict of str to ndarray
        The states at `position`.
    """

    def __init__(self, layout: Layout, *, capacity: int = 1024) -> None:
        if not layout.states and all(stream.tokens_per_row > 1 for stream in layout.streams):
            raise ValueError("a layout of strided streams alone forgets the tokens of an unfinished span: give it a state")
        self._layout = layout
        self.streams: dict[str, Array] = {s.name: np.zeros(s.array_shape(capacity), s.view_dtype) for s in layout.streams}
        self.states: dict[str, Array] = {}
        self.position = 0
        self._capacity = capacity
        self._hashers: list[blake3] = []
        self._handed_out = Expiring()
        self.reset()

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._layout

    def reset(self) -> None:
        """See `Engine.reset`. The arrays keep their bytes, as those of a real engine do."""
        self._handed_out.expire()
        self.position = 0
        self._clear_states()
        self._hashers = [blake3() for _ in self._layout.streams]

    def feed(self, tokens: Tokens) -> None:
        """Read tokens: what a real engine's prefill and decoding do."""
        self._handed_out.expire()
        for token in as_tokens(tokens):
            if self.position == self._capacity:
                raise ValueError(f"the engine has room for {self._capacity} positions")
            self._step(int(token))

    def capture(self, start: int, stop: int) -> Captured:
        """See `Engine.capture`."""
        self._handed_out.expire()
        if not 0 <= start < stop <= self.position or start % self._layout.block_tokens:
            raise ValueError(f"cannot capture [{start}, {stop}), the engine stands at {self.position}")
        streams: dict[str, Array] = {}
        for stream in self._layout.streams:
            span = slice(start // stream.tokens_per_row, stream.rows(stop))
            streams[stream.name] = self.streams[stream.name][(slice(None),) * stream.token_axis + (span,)].copy()
        states = {name: state.copy() for name, state in self.states.items()} if stop == self.position else {}
        self._handed_out.hand_out(*streams.values(), *states.values())
        return Captured(streams, states)

    def apply(self, restored: Restored) -> None:
        """See `Engine.apply`."""
        self._handed_out.expire()
        restored.copy_into(self.streams)
        states = restored.states()
        self.position = restored.length
        self.states = states
        self._reread()

    def scribble(self) -> None:
        """Overwrite every array and state with noise, as another session would. Use `reset` or `apply` before the next token."""
        self._handed_out.expire()
        for array in (*self.streams.values(), *self.states.values()):
            fill(array, STALE)
        self.position = 0

    def state_hash(self) -> StateHash:
        """Hash everything that the engine holds at its position, part by part."""
        return state_hash(self._layout, {**self.streams, **self.states}, self.position)

    def observe(self) -> bytes:
        """What the engine would say next: a hash of all that the next token's rows follow from."""
        return self._seen(b"observe").digest()

    def _seen(self, head: bytes) -> blake3:
        """Hash a few bytes and all that the engine holds."""
        seen = blake3(self.position.to_bytes(4, "little") + head)
        for hasher in self._hashers:
            seen.update(hasher.digest())
        for array in self.states.values():
            seen.update(array.tobytes())
        return seen

    def _step(self, token: int) -> None:
        key = self._seen(b"token %d" % token).digest()
        self.position += 1
        for index, stream in enumerate(self._layout.streams):
            if self.position % stream.tokens_per_row == 0:
                raw = blake3(b"row %d" % index, key=key).digest(length=stream.row_bytes)
                row = self._rows(stream.name, stream.token_axis)[stream.rows(self.position) - 1]
                row[...] = np.frombuffer(raw, stream.view_dtype).reshape(row.shape)
                self._hashers[index].update(raw)
        for index, state in enumerate(self._layout.states):
            shape = state_shape(state, self.position)
            size = int(np.prod(shape)) * state.view_dtype.itemsize
            raw = blake3(b"state %d" % index, key=key).digest(length=size) if size else b""
            self.states[state.name] = np.frombuffer(raw, state.view_dtype).reshape(shape).copy()

    def _reread(self) -> None:
        """Take in all rows anew, from the arrays: what was restored decides what comes after it."""
        self._hashers = []
        for stream in self._layout.streams:
            rows = self._rows(stream.name, stream.token_axis)[: stream.rows(self.position)]
            self._hashers.append(blake3(np.ascontiguousarray(rows).tobytes()))

    def _rows(self, name: str, axis: int) -> Array:
        return np.moveaxis(self.streams[name], axis, 0)

    def _clear_states(self) -> None:
        self.states = {s.name: np.zeros(state_shape(s, 0), s.view_dtype) for s in self._layout.states}
