"""Kinds of `HashEngine` that hand out something else than they hold, in one way each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvstore import Captured, Restored
from kvstore.testing import HashEngine


def _arrays(captured: Captured) -> dict[str, Any]:
    return dict(captured.streams)


class IgnoresTheStart(HashEngine):
    """Hands out as many rows as it was asked for, from 0."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        streams = {}
        for stream in self._layout.streams:
            count = stream.rows(stop) - stream.rows(start)
            streams[stream.name] = self.streams[stream.name][(slice(None),) * stream.token_axis + (slice(count),)]
        return replace(captured, streams=streams)


class AlwaysHandsOutStates(HashEngine):
    """Hands out its states with whatever rows it was asked for."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        return replace(super().capture(start, stop), states=self.states)


class NotInPlaceYet(HashEngine):
    """Hands out buffers into which the device hasn't written yet: what they hold is what was captured before."""

    before: Captured | None = None

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        now = super().capture(start, stop)
        kept = Captured(*({k: np.array(v) for k, v in named.items()} for named in (_arrays(now), now.states)))
        streams, states = {}, {}
        for name, array in _arrays(now).items():
            old = _arrays(self.before)[name] if self.before else None
            streams[name] = old if old is not None and old.shape == array.shape else np.zeros_like(array)
        for name, array in now.states.items():
            states[name] = self.before.states.get(name, np.zeros_like(array)) if self.before else np.zeros_like(array)
        self.before = kept
        return Captured(streams, states)


class OneScratchForAll(HashEngine):
    """Copies each stream into the same scratch memory: the last one overwrites those before."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        scratch = np.empty(max(array.nbytes for array in _arrays(captured).values()), np.uint8)
        streams = {}
        for name, array in _arrays(captured).items():
            there = scratch[: array.nbytes].view(array.dtype).reshape(array.shape)
            there[...] = array
            streams[name] = there
        return replace(captured, streams=streams)


class CaptureDisturbs(HashEngine):
    """Changes a state by handing it out."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        self.states["r"] = np.roll(self.states["r"], 1)
        return captured


class LeavesAStreamOut(HashEngine):
    """Captures one stream less than its layout has."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        return replace(captured, streams={k: v for k, v in captured.streams.items() if k != "v"})


class LosesRestoredRows(HashEngine):
    """Hands out only the rows that it has computed itself; what was restored has gone to its device."""

    own = 0

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self.own = restored.length

    def reset(self) -> None:
        """See the class."""
        super().reset()
        self.own = 0

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        _arrays(captured)["v"][: max(self.own - start, 0)] = 0
        return captured
