"""Engines of the tests: the synthetic one over several layouts, and wrappers that misbehave in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore import Captured, Layout, Restored, State, Stream
from kvstore.errors import BlockDamaged
from kvstore.ids import Tokens
from kvstore.testing import HashEngine

PLAIN = Layout(
    (Stream("k", "f16", (2, 8), 1), Stream("v", "u8", (24,)), Stream("vt", "f32", (4,), 1), Stream("pool", "f32", (3,), 0, 4)),
    block_tokens=16,
    model="plain",
)
HYBRID = Layout(
    (Stream("k", "bf16", (2, 8), 1), Stream("v", "i8", (24,))),
    (State("r", "f32", (30,)), State("window", "f16", (3, 7), (1,)), State.opaque("blob", 90)),
    block_tokens=16,
    model="hybrid",
)
RECURRENT = Layout((), (State("r", "f32", (64,)), State("conv", "u16", (3, 4))), block_tokens=16, model="recurrent")
LAYOUTS = {"plain": PLAIN, "hybrid": HYBRID, "recurrent": RECURRENT}


def uninterrupted(layout: Layout, tokens: Tokens) -> HashEngine:
    """An engine that has read everything at once."""
    engine = HashEngine(layout)
    engine.feed(tokens)
    return engine


class FailingApply(HashEngine):
    """Raises from `apply` after it has copied some streams, as often as it is told."""

    def __init__(self, layout: Layout, error: BaseException, times: int = 1) -> None:
        super().__init__(layout)
        self.error, self.times = error, times
        self.resets = 0

    def apply(self, restored: Restored) -> None:
        """Leave a mixture behind and raise."""
        if self.times:
            self.times -= 1
            for name in list(self.streams)[:1]:
                restored.copy_into({name: self.streams[name]})
            self.position = restored.length // 2
            raise self.error
        super().apply(restored)

    def reset(self) -> None:
        """Count."""
        self.resets = getattr(self, "resets", 0) + 1
        super().reset()


class Forgetful(HashEngine):
    """Takes a restored prefix without one of its parts."""

    def __init__(self, layout: Layout, forgets: str) -> None:
        super().__init__(layout)
        self.forgets = forgets

    def apply(self, restored: Restored) -> None:
        """Copy all but one."""
        restored.copy_into({name: array for name, array in self.streams.items() if name != self.forgets})
        if self.forgets != "states":
            self.states = restored.states()
        self.position = restored.length


class Piecewise(HashEngine):
    """Takes a restored prefix in ranges, through arrays that hold one of them."""

    def __init__(self, layout: Layout, ranges: Sequence[tuple[int, int]], names: Sequence[str] | None = None) -> None:
        super().__init__(layout)
        self.ranges = tuple(ranges)
        self.names = tuple(self.streams) if names is None else tuple(names)  # of the streams that are taken so; the others whole

    def apply(self, restored: Restored) -> None:
        """Copy the ranges in their order."""
        restored.copy_into({name: array for name, array in self.streams.items() if name not in self.names})
        for start, stop in self.ranges:
            part = {
                s.name: np.zeros(s.array_shape(stop - start), s.view_dtype) for s in self._layout.streams if s.name in self.names
            }
            restored.copy_into(part, start=start, stop=stop)
            for stream in self._layout.streams:
                if stream.name in part:
                    span = slice(start // stream.tokens_per_row, stop // stream.tokens_per_row)
                    self.streams[stream.name][(slice(None),) * stream.token_axis + (span,)] = part[stream.name]
        self.states = restored.states()
        self.position = restored.length
        self._reread()


class BadCapture(HashEngine):
    """Hands out something else than what it was asked for."""

    def __init__(self, layout: Layout, spoil: Any) -> None:
        super().__init__(layout)
        self.spoil = spoil

    def capture(self, start: int, stop: int) -> Captured:
        """Spoil what the engine would hand out."""
        spoiled: Captured = self.spoil(super().capture(start, stop))
        return spoiled


class Swallower(HashEngine):
    """Swallows the error of damaged bytes, against its contract, and pretends that all is well."""

    def apply(self, restored: Restored) -> None:
        """Pretend."""
        try:
            super().apply(restored)
        except BlockDamaged:
            self.position = restored.length


Arrays = Mapping[str, Any]
