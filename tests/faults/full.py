"""In a child with bad_writes.c in front: saves of every kind, of which one write after the other fails."""

from __future__ import annotations

import ctypes
import errno
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstore import KVStoreError, Layout, SessionTier, State, Store, Stream
from kvstore.errors import DiskError, StoreDamagedError, StoreFullError
from kvstore.testing import HashEngine
from tests.support import CAP, assert_sound, hybrid_layout, restored, save, twentieth, wide_layout

__all__ = ["arm", "engine", "make", "seen", "try_all"]

HYBRID, WIDE = hybrid_layout(), wide_layout()
HEAVY = Layout((Stream("k", "u8", (512,)),), (State("r", "f32", (768, 1024)),), block_tokens=64, model="heavy")
BASE = [(HYBRID, [1, *range(59)]), (HYBRID, [1, *range(20), 3, 3]), (WIDE, [2, *range(149)]), (HEAVY, [3, *range(70)])]
SMALL = [(WIDE, [n, *range(150)]) for n in range(20, 27)]
SMALL_CAP = 9 << 20


@dataclass(frozen=True, slots=True)
class Scenario:
    """A save: into which store, of what, and whether it is a session that shares nothing with those there."""

    name: str
    layout: Layout
    tokens: list[int]
    new: bool = True
    small: bool = False
    how: Literal["save", "cascade"] = "save"

    @property
    def acknowledged(self) -> list[tuple[Layout, list[int]]]:
        """What was saved before."""
        return SMALL if self.small else BASE


@dataclass(frozen=True, slots=True)
class Mode:
    """How a write fails: with what, whether those behind it do too, after half of it was written; and whether waits count."""

    name: str
    error: int
    on: bool
    half: bool = False
    waits: bool = False


SCENARIOS = [
    Scenario("short", HYBRID, [5000, *range(39)]),
    Scenario("in pieces", WIDE, [6000, *range(699)]),
    Scenario("states in pieces", HEAVY, [7000, *range(200)]),
    Scenario("extension", HYBRID, [*BASE[0][1], *range(300, 370)], new=False),
    Scenario("long extension", WIDE, [*BASE[2][1], *range(300, 500)], new=False),
    Scenario("branch", WIDE, [*BASE[2][1][:100], *[9] * 150], new=False),
    Scenario("evicting", WIDE, [8000, *range(299)], small=True),
    Scenario("cascade", HYBRID, [9000, *range(99)], how="cascade"),
    Scenario("cascade in pieces", HEAVY, [9500, *range(99)], how="cascade"),
]
MODES = [
    Mode("full", errno.ENOSPC, on=True),
    Mode("full by quota once", errno.EDQUOT, on=False),
    Mode("filling up", errno.ENOSPC, on=True, half=True),
    Mode("EIO", errno.EIO, on=True, waits=True),
    Mode("EIO once", errno.EIO, on=False, waits=True),
]


def make(home: Path) -> None:
    """Make the stores that the saves go into."""
    for name, cap, sessions in (("roomy", CAP, BASE), ("small", SMALL_CAP, SMALL)):
        with Store.open(home / name, max_bytes=cap) as store:
            for layout, tokens in sessions:
                save(store.namespace(layout), tokens)


def arm(call: int = 0, mode: Mode = MODES[0]) -> None:
    """Count the writing calls anew, and let the `call`-th of them fail (0: none)."""
    ctypes.CDLL(None).bad_writes_arm(ctypes.c_long(call), mode.error, int(mode.on), int(mode.half), int(mode.waits))


def seen() -> int:
    """How many writing calls there were."""
    count: int = ctypes.CDLL(None).bad_writes_seen()
    return count


def engine(layout: Layout, tokens: list[int]) -> HashEngine:
    """Give an engine that has read these tokens."""
    made = HashEngine(layout)
    made.feed(tokens)
    return made


@dataclass(frozen=True, slots=True)
class Held:
    """What a store holds, as far as it takes space."""

    nodes: int
    blocks: int
    payload_bytes: int
    pages: int

    @classmethod
    def of(cls, store: Store) -> Held:
        """Count it."""
        stats = store.stats()
        with store._scope.environment.reading() as txn:
            return cls(stats.nodes, stats.blocks, stats.payload_bytes, txn.live_pages())


def attempt(store: Store, scenario: Scenario) -> str:
    """Do the save; give the name of what was raised, or nothing. A cascade never raises: it counts a miss."""
    namespace = store.namespace(scenario.layout)
    if scenario.how == "save":
        try:
            save(namespace, scenario.tokens)
        except KVStoreError as error:
            assert str(error)
            return type(error).__name__
        return ""
    with SessionTier(store, engine(scenario.layout, scenario.tokens)) as tier:
        result = tier.cascade(scenario.tokens)
        tier.flush()
        stats = tier.stats
    assert (stats.cascades, stats.saved + stats.save_misses) == (1, 1)
    assert stats.faults == stats.save_misses
    return "miss" if stats.save_misses or result.missed else ""


def whole(store: Store, scenario: Scenario, *, evicting: bool = False) -> None:
    """Require that nothing is torn and that what was acknowledged is there, but for what was evicted by a save that went on."""
    assert_sound(store)
    for layout, tokens in scenario.acknowledged:
        length = restored(store.namespace(layout), tokens)
        assert evicting or length == len(tokens), (length, len(tokens))


def again(store: Store, scenario: Scenario) -> None:
    """Now that there is room: the session is saved, and comes back whole."""
    namespace, tokens = store.namespace(scenario.layout), scenario.tokens
    said = attempt(store, scenario)
    if said:
        with store._scope.environment.write(5.0):  # raises where nothing may be written before the store is opened anew
            raise AssertionError(f"there is room again, and still: {said}")
    if scenario.how == "save":
        assert restored(namespace, tokens) == len(tokens)
        return
    other = engine(scenario.layout, [4, 4, 4])
    with SessionTier(store, other) as tier:
        assert tier.promote([*tokens, 1]) == len(tokens)
    assert other.state_hash() == engine(scenario.layout, tokens).state_hash()


def trial(home: Path, scenario: Scenario, mode: Mode, call: int, counts: Counter[str]) -> None:
    """Let one call of one save fail, look at everything, and go on."""
    work = home / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(home / ("small" if scenario.small else "roomy"), work)
    store = Store.open(work)
    before = Held.of(store)
    arm(call, mode)
    said = attempt(store, scenario)
    failed = seen() >= call
    arm()
    if not said:
        assert not mode.on or not failed or mode.name == "full", (scenario, mode, call)  # a refused reservation is a hint refused
    allowed: dict[str, set[type[KVStoreError]]] = {
        "full": {StoreFullError},
        "EIO": {DiskError, StoreDamagedError},
        "filling": {StoreFullError, DiskError},
    }
    assert said in {"", "miss", *(kind.__name__ for kind in allowed[mode.name.split()[0]])}, (scenario, mode, call, said)
    counts[said or "stored"] += 1
    try:
        went_on(store, scenario, before, said)
    except StoreDamagedError:
        # the disk failed to keep what was written, or LMDB couldn't write its meta page: this process has to open it anew
        store.close()
        counts[f"reopened, {mode.name}"] += 1
        store = Store.open(work)
        went_on(store, scenario, before, said)
    store.close()


def went_on(store: Store, scenario: Scenario, before: Held, said: str) -> None:
    """All is there, all space is back, and the save succeeds now."""
    now = Held.of(store)
    nothing = (now.nodes, now.blocks, now.payload_bytes) == (before.nodes, before.blocks, before.payload_bytes)
    assert not nothing or now.pages == before.pages, (before, now)
    whole(store, scenario, evicting=scenario.small and not nothing)
    if said:
        again(store, scenario)
        whole(store, scenario, evicting=scenario.small)
    if scenario.new and not scenario.small:
        store.namespace(scenario.layout).evict(scenario.tokens)
        after = Held.of(store)
        assert after == before, (before, after)


def try_all(home: Path, seed: int) -> None:
    """Let each write of each save fail in each way, or a share of them; print what came of it."""
    make(home)
    trials: list[tuple[Scenario, Mode, int]] = []
    for scenario in SCENARIOS:
        for waits in (False, True):
            shutil.rmtree(home / "work", ignore_errors=True)
            shutil.copytree(home / ("small" if scenario.small else "roomy"), home / "work")
            with Store.open(home / "work") as store:
                arm(0, Mode("", 0, on=False, waits=waits))
                assert attempt(store, scenario) == ""
                writes = seen()
                arm()
            assert writes > 1
            trials += [(scenario, mode, call) for mode in MODES if mode.waits == waits for call in range(1, writes + 1)]
    chosen = random.Random(seed).sample(trials, min(twentieth(len(trials)), len(trials)))
    counts: Counter[str] = Counter(trials=0, all=len(trials))
    for scenario, mode, call in chosen:
        print(scenario.name, mode.name, call, flush=True)
        trial(home, scenario, mode, call, counts)
        counts["trials"] += 1
    print(json.dumps(counts))
