"""Kinds of `HashEngine` that are broken in one way each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from blake3 import blake3

from kvstore import Captured, Chunk, Layout, Restored
from kvstore.testing import HashEngine
from kvstore.testing.sessions import state_shape

from .whole import InChunks, InRanges


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


def unread(name: str, kind: type[HashEngine] = HashEngine) -> type[HashEngine]:
    """Make a kind of engine that saves and restores a part, and whose forward never reads it."""

    class Unread(kind):  # type: ignore[valid-type, misc]  # a class that is made from one that was given
        def _seen(self, head: bytes) -> blake3:
            with _without(self, name):
                seen: blake3 = super()._seen(head)
            return seen

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


class WindowAsRows(HashEngine):
    """Keeps the last 8 rows of v only and reads no others, and calls v a stream: cut further back, what it needs is gone."""

    def _seen(self, head: bytes) -> blake3:
        with _without(self, "v"):
            seen: blake3 = super()._seen(head)
        return seen.update(self.streams["v"][max(self.position - 8, 0) : self.position].tobytes())

    def _step(self, token: int) -> None:
        super()._step(token)
        self.streams["v"][: max(self.position - 8, 0)] = 0


class LooksAtTheShapeOnly(unread("window")):  # type: ignore[misc]  # a class made by a function
    """Never reads its window, which is empty of anything but zeros, but refuses one of another shape."""

    def _step(self, token: int) -> None:
        super()._step(token)
        self.states["window"][...] = 0

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        if self.states["window"].shape != state_shape(self._layout.states[1], self.position):
            raise ValueError("a window of another position")


class CountsItsRestores(unread("k")):  # type: ignore[misc]  # a class made by a function
    """Never reads k, and says something else after each restore, so that whatever was restored seems to matter."""

    restores = 0

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self.restores += 1

    def observe(self) -> bytes:
        """See the class."""
        said: bytes = super().observe()
        return said + bytes([self.restores % 256])


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


class KeepsItsStateToItself(HashEngine):
    """Has a state that its layout doesn't name, and keeps it in the process for the positions that were saved."""

    saved: dict[bytes, bytes] = {}  # noqa: RUF012 - shared by all engines of the class on purpose
    hidden = b""

    def _seen(self, head: bytes) -> blake3:
        return super()._seen(head).update(self.hidden)

    def _step(self, token: int) -> None:
        super()._step(token)
        self.hidden = blake3(self.hidden + token.to_bytes(4, "little")).digest()

    def capture(self, start: int, stop: int) -> Captured:
        """See the class."""
        if stop == self.position:
            self.saved[self.streams["v"][:stop].tobytes()] = self.hidden
        return super().capture(start, stop)

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self.hidden = self.saved.get(self.streams["v"][: self.position].tobytes(), b"")

    def reset(self) -> None:
        """See the class."""
        super().reset()
        self.hidden = b""


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


class SwallowsErrorsInRanges(InRanges):
    """Goes on after an error in one of its ranges."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        try:
            super().apply(restored)
        except Exception:
            self.position = restored.length


class RangesInOnePlace(InRanges):
    """Puts every range where the first one belongs."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        size = self._layout.block_tokens
        for start in range(0, restored.length, size):
            restored.copy_into(self.streams, start=start, stop=min(start + size, restored.length))
        self.states = restored.states()
        self.position = restored.length
        self._reread()


class ReadsChunksLate(InChunks):
    """Reads chunks when it has been given all of them, and their buffers hold others by then."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        with restored.chunks(self.cut(restored.length)) as filled:
            for chunk in list(filled):
                self.take(chunk)
        self.states = restored.states()
        self.position = restored.length
        self._reread()


class LeavesChunksOut(InChunks):
    """Doesn't ask for the last chunk."""

    def cut(self, length: int) -> list[Chunk]:
        """See the class."""
        chunks = super().cut(length)
        return chunks[:-1] or chunks


class SwallowsErrorsInChunks(InChunks):
    """Goes on after an error in one of its chunks."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        try:
            super().apply(restored)
        except Exception:
            self.position = restored.length


class SwallowsErrors(HashEngine):
    """Goes on after an error."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        try:
            super().apply(restored)
        except Exception:
            self.position = restored.length


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
