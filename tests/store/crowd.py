"""What each of many processes on one store does at once: save, match and restore sessions that share prefixes."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import sys
import time
import traceback
from collections import Counter
from typing import Any

from kvstore import Layout, SessionTier, Store
from kvstore.errors import BaseLost, SpacePinned, StoreFullError
from kvstore.layout import StateHash
from kvstore.testing import HashEngine, destination, session_rows, session_states, states_equal
from tests.support import hybrid_layout, wide_layout

__all__ = ["crowd", "fill"]

WIDE, HYBRID = wide_layout(), hybrid_layout()
_CALLS_AT_LEAST = 10
# A miss that a store under a tight cap may answer with, and the only ones.
MISSES = (SpacePinned, StoreFullError, BaseLost)


def _session(chance: random.Random, most: int) -> list[int]:
    """Give a session that others have as well, or a beginning of it: one of three trunks, and one of nine branches from it."""
    trunk, branch = chance.randrange(3), chance.randrange(9)
    cut = most * (branch % 3 + 1) // 4
    tokens = [
        *((n * 31 + trunk) % 977 for n in range(cut)),
        1000 + branch,
        *((n * 17 + branch) % 977 for n in range(most - cut - 1)),
    ]
    return tokens[: chance.choice([most, chance.randrange(2, most)])]


@functools.lru_cache(40)
def _rows(layout: Layout, tokens: tuple[int, ...]) -> dict[str, Any]:
    return session_rows(layout, list(tokens))


def _restore(store: Store, layout: Layout, tokens: list[int], *, by_view: bool) -> int:
    namespace = store.namespace(layout)
    namespace.match(tokens)
    with namespace.lease(tokens) as lease:
        if not lease:
            return 0
        right = _rows(layout, tuple(tokens[: lease.length]))
        if by_view:
            lease.validate()
            got = {s.name: b"".join(view.tobytes() for view in lease.views(s.name)) for s in layout.streams if not s.token_axis}
        else:
            into = destination(layout, lease.length)
            lease.copy_into(into)
            got = {name: array.tobytes() for name, array in into.items()}
        assert all(raw == right[name].tobytes() for name, raw in got.items()), "wrong bytes"
        if layout.states:
            assert states_equal(lease.states(), session_states(layout, tokens[: lease.length])), "wrong states"
        return lease.length


def _use_namespaces(store: Store, chance: random.Random, counts: Counter[str]) -> None:
    """One call of the library's."""
    layout = chance.choice([WIDE, WIDE, HYBRID])
    tokens = _session(chance, 350 if layout is WIDE else 120)
    if chance.random() < 0.5:
        length = _restore(store, layout, tokens, by_view=chance.random() < 0.3)
        counts["restores" if length else "restores of nothing"] += 1
        return
    try:
        states = session_states(layout, tokens) if layout.states else None
        store.namespace(layout).save(tokens, _rows(layout, tuple(tokens)), states=states)
        counts["saves"] += 1
    except MISSES as error:
        counts[f"miss {type(error).__name__}"] += 1


@functools.lru_cache(64)
def _right(tokens: tuple[int, ...]) -> StateHash:
    engine = HashEngine(HYBRID)
    engine.feed(tokens)
    return engine.state_hash()


def _use_tier(tier: SessionTier, engine: HashEngine, chance: random.Random, counts: Counter[str]) -> None:
    """One request of a server's."""
    prompt = _session(chance, 120)
    engine.scribble()
    reused = tier.promote(prompt)
    counts["promotes" if reused else "promotes of nothing"] += 1
    engine.feed(prompt[reused:])
    assert engine.state_hash() == _right(tuple(prompt)), "wrong bytes"
    tier.cascade(prompt)
    if chance.random() < 0.3:
        tier.flush()


class _Faults(logging.Handler):
    """Counts what a tier logs instead of raising."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        names = [kind.__name__ for kind in MISSES if f"{kind.__name__}:" in text]
        self._counts[f"miss {names[0]}" if names else f"error {text}"] += 1


def fill(store: Store) -> None:
    """Save what the crowd is going to save, as much of it as there is room for: whoever saves then has to evict."""
    chance = random.Random(0)
    for _ in range(60):
        tokens = _session(chance, 350)
        store.namespace(WIDE).save(tokens, _rows(WIDE, tuple(tokens)))


def _work(path: str, place: int, seed: int, seconds: float) -> Counter[str]:
    chance, counts = random.Random(f"{seed} {place}"), Counter[str]()
    logging.getLogger("kvstore").addHandler(_Faults(counts))
    started, calls = time.monotonic(), 0

    def goes_on() -> bool:  # on a machine that is busy with other things each does something nevertheless
        nonlocal calls
        calls += 1
        return calls <= _CALLS_AT_LEAST or time.monotonic() < started + seconds

    with Store.open(path) as store:
        if place % 2:
            while goes_on():
                _use_namespaces(store, chance, counts)
        else:
            engine = HashEngine(HYBRID)
            with SessionTier(store, engine, salt=b"served") as tier:
                while goes_on():
                    _use_tier(tier, engine, chance, counts)
                tier.flush()
                counts["cascades"] = tier.stats.saved
                assert tier.stats.fallbacks == 0
        counts["sessions' ends evicted"] = store.stats().counters.evicted_nodes
    return counts


def crowd(path: str, processes: int, seed: int, seconds: float) -> None:
    """Fork so many workers, before anything is open, and print what all of them counted."""
    pipes = []
    for place in range(processes):
        out, into = os.pipe()
        if not os.fork():
            try:
                counts = _work(path, place, seed, seconds)
            except BaseException:
                counts = Counter({f"error {traceback.format_exc()}": 1})
            os.write(into, json.dumps(counts).encode())
            os._exit(0)
        os.close(into)
        pipes.append(os.fdopen(out))
    total: Counter[str] = Counter()
    for pipe in pipes:
        total.update(json.loads(pipe.read() or '{"error a worker died": 1}'))
    json.dump(total, sys.stdout)
