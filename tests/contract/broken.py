"""Kinds of `HashEngine` that are broken in one way each, and some that are not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3

from kvstore import Captured, Layout, Paged, Restored
from kvstore.arrays import StreamArray
from kvstore.testing import HashEngine


class HandsOutViews(HashEngine):
    """Not broken: hands out views of its own arrays, which are overwritten when it reads on."""

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        streams = {
            s.name: self.streams[s.name][(slice(None),) * s.token_axis + (slice(s.rows(start), s.rows(stop)),)]
            for s in self._layout.streams
        }
        return Captured(streams, self.states if stop == self.position else {})


class PartByPart(HashEngine):
    """Not broken: takes one stream after another, the states first."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        self.states = restored.states()
        for name, array in self.streams.items():
            restored.copy_into({name: array})
        self.position = restored.length
        self._reread()


class InPages(HashEngine):
    """Not broken: keeps the rows of its device in pages of three, back to front, and hands those out and takes those."""

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
        streams: dict[str, StreamArray] = {}
        for stream in self._layout.streams:
            paged = self._paged[stream.name]
            span = paged.slots[stream.rows(start) : stream.rows(stop)]
            pages = np.moveaxis(paged.pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
            pages[span // 3, span % 3] = np.moveaxis(_arrays(captured)[stream.name], stream.token_axis, 0)
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
    """Not broken: its arrays are of ml_dtypes' types, which numpy itself doesn't know."""

    def typed(self) -> dict[str, Any]:
        """Its streams and states: the same bytes in those types."""
        return {name: _typed(array) for name, array in {**self.streams, **self.states}.items()}

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        streams, states = ({k: _typed(v) for k, v in named.items()} for named in (_arrays(captured), captured.states))
        return Captured(streams, states)

    def apply(self, restored: Restored) -> None:
        """See the class."""
        restored.copy_into({name: _typed(array) for name, array in self.streams.items()})
        self.states = restored.states()
        self.position = restored.length
        self._reread()


def _typed(array: Any) -> Any:
    return array.view(ml_dtypes.bfloat16 if array.dtype == np.uint16 else ml_dtypes.float8_e4m3fn)


def forgetful(name: str) -> type[HashEngine]:
    """Make a kind of engine that takes a part, so that nobody complains, and puts it nowhere."""

    class Forgetful(HashEngine):
        def apply(self, restored: Restored) -> None:
            """See the class."""
            mine = {**self.streams, **self.states}[name].copy()
            super().apply(restored)
            (self.streams if name in self.streams else self.states)[name] = mine
            self._reread()

    return Forgetful


def unread(name: str) -> type[HashEngine]:
    """Make a kind of engine that saves and restores a part, and whose forward never reads it."""

    class Unread(HashEngine):
        def _seen(self, head: bytes) -> blake3:
            with _without(self, name):
                return super()._seen(head)

    return Unread


@contextmanager
def _without(engine: HashEngine, name: str) -> Iterator[None]:
    hashers, states = engine._hashers, engine.states
    try:
        engine._hashers = [h for s, h in zip(engine._layout.streams, hashers, strict=True) if s.name != name]
        engine.states = {other: state for other, state in states.items() if other != name}
        yield
    finally:
        engine._hashers, engine.states = hashers, states


class ReadsTheFirstRowsOnly(HashEngine):
    """Its forward reads no row of v behind the first block's: the rest could be lost."""

    def _step(self, token: int) -> None:
        kept = self._hashers[1].copy()
        super()._step(token)
        if self.position > self._layout.block_tokens:
            self._hashers[1] = kept

    def _reread(self) -> None:
        super()._reread()
        rows = self.streams["v"][: min(self.position, self._layout.block_tokens)]
        self._hashers[1] = blake3(np.ascontiguousarray(rows).tobytes())


class StaysWithItsOwn(HashEngine):
    """Takes the arrays and goes on from what it had read itself."""

    def _reread(self) -> None:
        pass


class OnePositionShort(HashEngine):
    """Stands one position before the one that was restored."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self.position -= 1


class DropsTheTail(HashEngine):
    """Takes whole blocks only, and pretends that it has taken the rows of the last one too."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        whole = self.position - self.position % self._layout.block_tokens
        self.streams["v"][whole : self.position] = 0
        self._reread()


class DropsAWholeLastBlock(HashEngine):
    """Takes the last block for a tail of no rows when the length is a multiple of the block."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        size = self._layout.block_tokens
        if self.position % size == 0:
            self.streams["v"][self.position - size : self.position] = 0
            self._reread()


class HiddenCounter(HashEngine):
    """Holds something that follows from its past and that its layout doesn't name."""

    def _seen(self, head: bytes) -> blake3:
        return super()._seen(head).update(bytes([self._fed % 256]))

    def feed(self, tokens: Any) -> None:
        """See the class."""
        super().feed(tokens)
        self._fed += len(tokens)

    def reset(self) -> None:
        """See the class."""
        super().reset()
        self._fed = 0


class Moody(HashEngine):
    """What it says follows from something that its rows and states don't."""

    fed = 0

    def feed(self, tokens: Any) -> None:
        """See the class."""
        super().feed(tokens)
        self.fed += len(tokens)

    def observe(self) -> bytes:
        """See the class."""
        return super().observe() + bytes([self.fed % 256])


class RemembersTheLongest(HashEngine):
    """Reads all rows that it has ever had, also behind the end of what was restored: its mask is stale."""

    longest = 0

    def feed(self, tokens: Any) -> None:
        """See the class."""
        super().feed(tokens)
        self.longest = max(self.longest, self.position)

    def _reread(self) -> None:
        self._hashers = []
        for stream in self._layout.streams:
            rows = self._rows(stream.name, stream.token_axis)[: stream.rows(max(self.longest, self.position))]
            self._hashers.append(blake3(np.ascontiguousarray(rows).tobytes()))

    def reset(self) -> None:
        """See the class."""
        super().reset()
        self.longest = 0


class GoesToTheSavedEnd(HashEngine):
    """Stands where the session was saved last, not where it was restored."""

    saved: dict[bytes, int] = {}  # noqa: RUF012 - shared by all engines of the class on purpose

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        captured = super().capture(start, stop)
        self.saved[self.streams["v"][:1].tobytes()] = stop
        return captured

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        end = self.saved.get(self.streams["v"][:1].tobytes(), 0)
        if end > self.position:
            self.position = end
            self._reread()


class RewritesThePast(HashEngine):
    """Changes the row before with each token."""

    def _step(self, token: int) -> None:
        super()._step(token)
        if self.position > 1:
            self.streams["v"][self.position - 2] ^= np.uint8(token % 255 + 1)
            self._reread()


class KeepsStatesAtReset(HashEngine):
    """Resets its position only."""

    def _clear_states(self) -> None:
        if not self.states:
            super()._clear_states()


class NeverResets(HashEngine):
    """Resets nothing."""

    def reset(self) -> None:
        """See the class."""
        if not hasattr(self, "done"):
            super().reset()
            self.done = True


class KeepsStatesAtResetAfterARestore(HashEngine):
    """Resets well, but for what a restore has brought."""

    restored = False

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self.restored = True

    def _clear_states(self) -> None:
        if not self.restored:
            super()._clear_states()


class KeepsAMixture(HashEngine):
    """Takes a reset in the middle of a restore for an interruption: what was copied by then stays."""

    taking = False

    def apply(self, restored: Restored) -> None:
        """See the class."""
        self.taking = True
        self.position = restored.length
        super().apply(restored)
        self.taking = False

    def reset(self) -> None:
        """See the class."""
        if self.taking:
            self._handed_out.expire()
        else:
            super().reset()


class SwallowsErrors(HashEngine):
    """Goes on after an error."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        try:
            super().apply(restored)
        except Exception:
            self.position = restored.length


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


class CountsItself(HashEngine):
    """Puts into its layout which engine of the process it is."""

    number = itertools.count()

    def __init__(self, layout: Layout) -> None:
        super().__init__(replace(layout, identity={"engine": next(self.number)}))


class LayoutOfTheMoment(HashEngine):
    """Puts its position into its layout."""

    def layout(self) -> Layout:
        """See the class."""
        return replace(self._layout, identity={"position": self.position})


class Throws(HashEngine):
    """Rolls dice."""

    def _seen(self, head: bytes) -> blake3:
        return super()._seen(head).update(os.urandom(4))


class Deaf(HashEngine):
    """Computes the same whatever it reads."""

    def _step(self, token: int) -> None:
        super()._step(0)


class OneMemory(HashEngine):
    """Two engines have one array between them."""

    shared = np.zeros((1024, 24), np.uint8)

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.streams["v"] = self.shared


class Restarts(HashEngine):
    """Tells a server's second request from its first: rows follow from how often the engine was used."""

    uses = 0

    def reset(self) -> None:
        """See the class."""
        super().reset()
        self.uses += 1

    def _seen(self, head: bytes) -> blake3:
        return super()._seen(head).update(bytes([self.uses]))
