"""Engines that are broken in one way each, and what the suite has to say about them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3

from kvstore import Captured, Layout, Restored
from kvstore.testing import EngineDriver, HashEngine, SyntheticHybrid

from .drivers import HYBRID, PLAIN, RECURRENT, HashDriver, HybridDriver

__all__ = ["GOOD", "MUTANTS", "Mutant", "forgetful"]


class HandsOutViews(HashEngine):
    """Not broken: hands out views of its own arrays, which are overwritten when it reads on."""

    def capture(self, start: int, stop: int) -> Captured:
        streams = {
            s.name: self.streams[s.name][(slice(None),) * s.token_axis + (slice(s.rows(start), s.rows(stop)),)]
            for s in self._layout.streams
        }
        return Captured(streams, self.states if stop == self.position else {})


class PartByPart(HashEngine):
    """Not broken: takes one stream after another, the states first."""

    def apply(self, restored: Restored) -> None:
        self.states = restored.states()
        for name, array in self.streams.items():
            restored.copy_into({name: array})
        self.position = restored.length
        self._reread()


def forgetful(name: str) -> type[HashEngine]:
    """Make a kind of engine that takes a part, so that nobody complains, and puts it nowhere."""

    class Forgetful(HashEngine):
        def apply(self, restored: Restored) -> None:
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
        super().apply(restored)
        self.position -= 1


class DropsTheTail(HashEngine):
    """Takes whole blocks only, and pretends that it has taken the rows of the last one too."""

    def apply(self, restored: Restored) -> None:
        super().apply(restored)
        whole = self.position - self.position % self._layout.block_tokens
        self.streams["v"][whole : self.position] = 0
        self._reread()


class DropsAWholeLastBlock(HashEngine):
    """Takes the last block for a tail of no rows when the length is a multiple of the block."""

    def apply(self, restored: Restored) -> None:
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
        super().feed(tokens)
        self._fed += len(tokens)

    def reset(self) -> None:
        super().reset()
        self._fed = 0


class Moody(HashEngine):
    """What it says follows from something that its rows and states don't."""

    fed = 0

    def feed(self, tokens: Any) -> None:
        super().feed(tokens)
        self.fed += len(tokens)

    def observe(self) -> bytes:
        return super().observe() + bytes([self.fed % 256])


class RemembersTheLongest(HashEngine):
    """Reads all rows that it has ever had, also behind the end of what was restored: its mask is stale."""

    longest = 0

    def feed(self, tokens: Any) -> None:
        super().feed(tokens)
        self.longest = max(self.longest, self.position)

    def _reread(self) -> None:
        self._hashers = []
        for stream in self._layout.streams:
            rows = self._rows(stream.name, stream.token_axis)[: stream.rows(max(self.longest, self.position))]
            self._hashers.append(blake3(np.ascontiguousarray(rows).tobytes()))

    def reset(self) -> None:
        super().reset()
        self.longest = 0


class GoesToTheSavedEnd(HashEngine):
    """Stands where the session was saved last, not where it was restored."""

    saved: dict[bytes, int] = {}  # noqa: RUF012 - shared by all engines of the class on purpose

    def capture(self, start: int, stop: int) -> Captured:
        captured = super().capture(start, stop)
        self.saved[self.streams["v"][:1].tobytes()] = stop
        return captured

    def apply(self, restored: Restored) -> None:
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
        if not hasattr(self, "done"):
            super().reset()
            self.done = True


class KeepsStatesAtResetAfterARestore(HashEngine):
    """Resets well, but for what a restore has brought."""

    restored = False

    def apply(self, restored: Restored) -> None:
        super().apply(restored)
        self.restored = True

    def _clear_states(self) -> None:
        if not self.restored:
            super()._clear_states()


class KeepsAMixture(HashEngine):
    """Takes a reset in the middle of a restore for an interruption: what was copied by then stays."""

    taking = False

    def apply(self, restored: Restored) -> None:
        self.taking = True
        self.position = restored.length
        super().apply(restored)
        self.taking = False

    def reset(self) -> None:
        if self.taking:
            self._handed_out.expire()
        else:
            super().reset()


class SwallowsErrors(HashEngine):
    """Goes on after an error."""

    def apply(self, restored: Restored) -> None:
        try:
            super().apply(restored)
        except Exception:
            self.position = restored.length


def _arrays(captured: Captured) -> dict[str, Any]:
    return dict(captured.streams)


class IgnoresTheStart(HashEngine):
    """Hands out as many rows as it was asked for, from 0."""

    def capture(self, start: int, stop: int) -> Captured:
        captured = super().capture(start, stop)
        streams = {}
        for stream in self._layout.streams:
            count = stream.rows(stop) - stream.rows(start)
            streams[stream.name] = self.streams[stream.name][(slice(None),) * stream.token_axis + (slice(count),)]
        return replace(captured, streams=streams)


class AlwaysHandsOutStates(HashEngine):
    """Hands out its states with whatever rows it was asked for."""

    def capture(self, start: int, stop: int) -> Captured:
        return replace(super().capture(start, stop), states=self.states)


class NotInPlaceYet(HashEngine):
    """Hands out buffers into which the device hasn't written yet: what they hold is what was captured before."""

    before: Captured | None = None

    def capture(self, start: int, stop: int) -> Captured:
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
        captured = super().capture(start, stop)
        self.states["r"] = np.roll(self.states["r"], 1)
        return captured


class LeavesAStreamOut(HashEngine):
    """Captures one stream less than its layout has."""

    def capture(self, start: int, stop: int) -> Captured:
        captured = super().capture(start, stop)
        return replace(captured, streams={k: v for k, v in captured.streams.items() if k != "v"})


class LosesRestoredRows(HashEngine):
    """Hands out only the rows that it has computed itself; what was restored has gone to its device."""

    own = 0

    def apply(self, restored: Restored) -> None:
        super().apply(restored)
        self.own = restored.length

    def reset(self) -> None:
        super().reset()
        self.own = 0

    def capture(self, start: int, stop: int) -> Captured:
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
        super().reset()
        self.uses += 1

    def _seen(self, head: bytes) -> blake3:
        return super()._seen(head).update(bytes([self.uses]))


def forgetful_hybrid(*names: str) -> type[SyntheticHybrid]:
    """Make a kind of hybrid that takes parts and puts them nowhere."""

    class Forgetful(SyntheticHybrid):
        def apply(self, restored: Restored) -> None:
            mine = {name: self.streams[name].copy() for name in names if name in self.streams}
            states = {name: state.copy() for name, state in self.states.items() if name in names}
            super().apply(restored)
            for name, rows in mine.items():
                self.streams[name][...] = rows
            self._rows_seen = blake3(self._rows[: self.position].tobytes())
            for name, state in states.items():
                there = self.states[name]
                there[...] = state if there.shape == state.shape else 0

    return Forgetful


class UnreadDrafter(SyntheticHybrid):
    """Its drafter starts anew after each restore, and nobody asks what it would have proposed."""

    def _hash(self, head: bytes) -> blake3:
        ring, self._ring = self._ring, np.zeros_like(self._ring)
        try:
            return super()._hash(head)
        finally:
            self._ring = ring


class Unshifted(SyntheticHybrid):
    """Takes the drafter's rows without their shift: each is one position off."""

    def apply(self, restored: Restored) -> None:
        super().apply(restored)
        rows = self._rows[: self.position, self._drafter]
        rows[:-1] = rows[1:].copy()
        self._rows_seen = blake3(self._rows[: self.position].tobytes())


class DeadKeyElsewhere(SyntheticHybrid):
    """Restores the dead key into row 0 of the pooled keys, wherever the spare row is."""

    def apply(self, restored: Restored) -> None:
        super().apply(restored)
        self._pooled[0] = self.states["index.dead"]


@dataclass(frozen=True)
class Mutant:
    """One broken engine: what drives it, the check that has to fail, and what it has to say among other things."""

    driver: EngineDriver[Any]
    check: str
    says: str


def _hash(kind: Callable[[Layout], HashEngine], layout: Layout = HYBRID) -> HashDriver:
    return HashDriver(layout, kind)


GOOD: dict[str, EngineDriver[Any]] = {
    "plain": HashDriver(PLAIN),
    "hybrid": HashDriver(HYBRID),
    "recurrent": HashDriver(RECURRENT),
    "views": _hash(HandsOutViews, PLAIN),
    "views with states": _hash(HandsOutViews),
    "part by part": _hash(PartByPart),
}

_FRESH = "a fresh engine after a restore: at position"


def _forgetful_hybrid(name: str) -> Mutant:
    # the dead key stands behind the last pooled row, so that it is seen through both
    also = ", index.dead" if name == "index.pooled" else ""
    return Mutant(HybridDriver(forgetful_hybrid(name)), "round_trip", f"{_FRESH} 161 {name}{also} differ: {name} (")


MUTANTS: dict[str, Mutant] = {
    **{
        f"forgets {name}": Mutant(
            _hash(forgetful(name)), "round_trip", f"a fresh engine after a restore: at position 41 {name} differ"
        )
        for name in ("k", "v", "pool", "r", "window", "blob")
    },
    **{
        f"forgets {name}, no states": Mutant(_hash(forgetful(name), PLAIN), "round_trip", f"41 {name} differ: {name} (row 0")
        for name in ("k", "vt", "pool")
    },
    **{
        f"never reads {name}": Mutant(_hash(unread(name)), "negative_controls", f"omission of {name} would go unnoticed")
        for name in ("k", "v", "pool", "r", "window", "blob")
    },
    "never reads a stream, no states": Mutant(_hash(unread("vt"), PLAIN), "negative_controls", "omission of vt"),
    "never reads a state, no streams": Mutant(_hash(unread("conv"), RECURRENT), "negative_controls", "omission of conv"),
    "reads the first rows only": Mutant(_hash(ReadsTheFirstRowsOnly, PLAIN), "negative_controls", "its last row"),
    "stays with its own": Mutant(_hash(StaysWithItsOwn), "round_trip", "goes on from a restore differently"),
    "one position short": Mutant(_hash(OnePositionShort), "round_trip", "goes on from a restore differently"),
    "drops the tail": Mutant(_hash(DropsTheTail), "round_trip", "v (row 32; 9 of 41 rows)"),
    "drops a whole last block": Mutant(_hash(DropsAWholeLastBlock), "block_boundaries", "v (row 0; 16 of 16 rows)"),
    "a hidden counter": Mutant(_hash(HiddenCounter), "round_trip", "goes on from a restore differently"),
    "moody": Mutant(_hash(Moody), "round_trip", "holds something that its layout doesn't name"),
    "remembers the longest": Mutant(_hash(RemembersTheLongest), "dirty_engine", "something longer before goes on differently"),
    "goes to the saved end": Mutant(_hash(GoesToTheSavedEnd, PLAIN), "offered_positions", "a fresh engine and a used one"),
    "rewrites the past": Mutant(_hash(RewritesThePast, PLAIN), "shared_prefix", "position 41 v differ: v (row 23"),
    "keeps its states at a reset": Mutant(_hash(KeepsStatesAtReset), "reset_forgets", "reset after something longer"),
    "never resets": Mutant(_hash(NeverResets, PLAIN), "reset_forgets", "reset after something longer"),
    "keeps restored states at a reset": Mutant(_hash(KeepsStatesAtResetAfterARestore), "reset_forgets", "reset after a restore"),
    "keeps a mixture": Mutant(_hash(KeepsAMixture), "failed_apply", "a restore failed at k, and the prompt was read anew"),
    "swallows errors": Mutant(_hash(SwallowsErrors), "failed_apply", "the engine would go on with a mixture"),
    "ignores the start": Mutant(_hash(IgnoresTheStart), "capture_in_pieces", "against all at once: k, v, pool differ"),
    "always hands out states": Mutant(_hash(AlwaysHandsOutStates), "capture_in_pieces", "too much"),
    "not in place yet": Mutant(_hash(NotInPlaceYet), "overwritten_at_once", "before the engine was overwritten: at position"),
    "one scratch for all": Mutant(_hash(OneScratchForAll), "round_trip", "41 k, v differ"),
    "capture disturbs": Mutant(_hash(CaptureDisturbs), "capture_twice", "against the first: r differ"),
    "leaves a stream out": Mutant(_hash(LeavesAStreamOut), "round_trip", "missing ['v']"),
    "loses restored rows": Mutant(_hash(LosesRestoredRows), "restored_twice", "against one that wasn't: v differ"),
    "counts itself": Mutant(_hash(CountsItself), "same_layout", "two layouts"),
    "layout of the moment": Mutant(_hash(LayoutOfTheMoment), "same_layout", "two layouts"),
    "throws dice": Mutant(_hash(Throws), "deterministic", "two engines that read the same in the same batches"),
    "deaf": Mutant(_hash(Deaf), "deterministic", "nothing could be told apart"),
    "one memory": Mutant(_hash(OneMemory, PLAIN), "two_at_once", "while another one reads something else: at position"),
    "restarts": Mutant(_hash(Restarts), "reset_forgets", "reset after something longer"),
    **{
        f"hybrid forgets {name}": Mutant(
            HybridDriver(forgetful_hybrid(name)), "round_trip", f"at position 161 {name} differ: {name} ("
        )
        for name in (
            "attn.3.k",
            "attn.47.v_scale",
            "drafter.v",
            "index.pooled",
            "gdn.0.state",
            "gdn.46.conv",
            "index.tail",
            "index.block_pos",
            "index.dead",
            "ple.history",
            "last_token",
            "drafter.ring",
            "drafter.ring_at",
        )
    },
    "hybrid never reads the ring": Mutant(HybridDriver(UnreadDrafter), "negative_controls", "omission of drafter.ring would"),
    "hybrid without the shift": Mutant(
        HybridDriver(Unshifted), "round_trip", f"{_FRESH} 161 drafter.k, drafter.v differ: drafter.k (row 0"
    ),
    "hybrid's dead key elsewhere": Mutant(HybridDriver(DeadKeyElsewhere), "round_trip", f"{_FRESH} 161 index.pooled differ"),
}
