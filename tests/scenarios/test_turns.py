"""Writers take turns: what takes long is done outside of the write lock, and what is much is done in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.eviction import Candidate, LeastRecentlyUsed
from kvstore.radix import find_disagreements, nodes
from kvstore.records.meta import SWEEP_KEY
from tests.store.index import nodes_on
from tests.support import assert_restores, assert_sound, plain_layout, save, wide_layout

from .conftest import Acting

TOKENS = list(range(100, 140))


def transactions(store: Store) -> int:
    """How many transactions the store has seen."""
    with store._scope.environment.reading() as txn:
        return txn.transaction


class Watching(LeastRecentlyUsed):
    """Ranks, and notes whether the write lock was held meanwhile."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: list[bool] = []

    def rank(self, candidates: Iterable[Candidate]) -> Sequence[Candidate]:
        """Rank."""
        self.held.append(self.store._scope.environment._mutex.locked())
        return super().rank(candidates)


def test_candidates_are_ranked_outside_of_the_lock(store: Store) -> None:
    """The pass over all nodes that eviction needs is made while nobody waits for it, whatever it is that evicts."""
    policy = store._scope._victims._policy = Watching(store)
    namespace = store.namespace(wide_layout())
    for n in range(30):
        save(namespace, [n, *range(1, 200)])
    assert store.stats().counters.evicted_nodes > 5
    made = len(policy.held)
    assert 0 < made < 20  # not for every save
    store.evict(free_bytes=1 << 20)
    store._scope._free_some(1, set())
    assert len(policy.held) == made + 2
    assert not any(policy.held)
    assert_restores(namespace, [29, *range(1, 200)], 200)


def test_a_limit_that_comes_down_is_reached_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of another block size lowers the limit by many sessions: each save evicts some, and more than it puts."""
    monkeypatch.setattr("kvstore.radix.remove._NODES_AT_ONCE", 2)
    with Store.open(path, max_bytes=128 << 20) as store:
        large, small = store.namespace(wide_layout(block_tokens=128)), store.namespace(wide_layout())
        n = 0
        while not store.stats().counters.evicted_nodes:
            n += 1
            save(large, [n, *range(1, 128)])
        evicted = [store.stats().counters.evicted_nodes]
        for n in range(8):
            save(small, [n])
            evicted.append(store.stats().counters.evicted_nodes)
            assert evicted[-1] - evicted[-2] <= 3
        assert evicted[-1] - evicted[0] >= 7
        stats = store.stats()
        assert stats.live_bytes <= stats.limit_bytes
        assert_sound(store)


def test_a_long_session_is_evicted_in_steps(store: Store) -> None:
    """Evicting a session of many blocks, a namespace or much at once takes several transactions, each a shorter prefix."""
    namespace = store.namespace(plain_layout())
    long = [n % 977 for n in range(20_000)]  # 1250 blocks: references to 6 and a tail, all rows being alike
    layout = namespace.layout
    rows = {s.name: np.zeros(s.array_shape(len(long)), s.view_dtype) for s in layout.streams}
    ways: list[Callable[[], Any]] = [
        lambda: namespace.evict(long),
        lambda: namespace.evict(),
        lambda: store.evict(free_bytes=1 << 40),
        lambda: store.evict_namespace(namespace.namespace_id),
    ]
    for evict in ways:
        namespace.save(long, rows)
        assert len(nodes_on(namespace, long)) >= 7
        before = transactions(store)
        result = evict()
        assert (result.nodes >= 7, result.tokens) == (True, 20_000)
        assert transactions(store) - before >= 4
        assert store.stats().blocks == store.stats().nodes == 0
        assert_sound(store)


@pytest.mark.parametrize("busy", [False, True])
def test_damage_is_looked_for_outside_of_the_lock(store: Store, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """A sweep looks the index over while others may write; where they do so again and again it takes the lock for it in the end."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    looked: list[bool] = []

    def look(txn: Any) -> Any:
        looked.append(store._scope.environment._mutex.locked())
        found = find_disagreements(txn)
        if busy:
            save(store.namespace(plain_layout(), salt=b"busy"), [len(looked)])
        return found

    with store._scope.environment.write(5.0) as txn:
        txn.put(txn.db.usage, (10**9).to_bytes(8, "big"), b"of no node")
        txn.damage = True
    monkeypatch.setattr("kvstore.scope.store.find_disagreements", look)
    store._scope._sweep_after = float("inf") if busy else float("-inf")
    swept = store._scope._swept(5.0)
    assert swept.records == 1
    assert looked == [False] * (3 if busy else 1)
    with store._scope.environment.reading() as reader:
        assert reader.get(SWEEP_KEY, reader.db.meta) is None
    assert_restores(namespace, TOKENS, 40)


def test_a_process_that_only_reads_keeps_alive_what_it_reads(store: Store, actor: Acting) -> None:
    """Uses are written now and then by whoever reads, where nobody is writing: one that is killed loses the last ones alone."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    [node] = nodes_on(namespace, TOKENS)

    def last_use() -> int:
        with store._scope.environment.reading() as txn:
            return nodes.usage_of(txn, node.node).last_use

    saved, before = last_use(), transactions(store)
    reader = actor("namespace = store.namespace(plain_layout())")
    for _ in range(5):
        assert reader.do(f"restored(namespace, {TOKENS})") == "40"
    assert (last_use(), transactions(store)) == (saved, before)  # a hit costs no write
    reader.do("setattr(store._scope, '_touches_due', 0.0)")
    with store._scope.environment.write(5.0):
        assert reader.do(f"restored(namespace, {TOKENS})") == "40"  # and waits for none
    assert last_use() == saved
    reader.do("setattr(store._scope, '_touches_due', 0.0)")
    for _ in range(5):
        assert reader.do(f"restored(namespace, {TOKENS})") == "40"
    reader.kill()
    assert last_use() > saved
    assert transactions(store) == before + 1  # and not five


def test_uses_are_written_in_steps(store: Store) -> None:
    """Of many uses that wait to be written a save carries some, the oldest, and a close all."""
    namespace = store.namespace(plain_layout())
    scope = store._scope
    save(namespace, TOKENS)
    for node in range(10_000, 11_200):
        scope.touch(node)
    scope.touch(10_000)  # the latest now
    save(namespace, [5, 6])
    assert (len(scope._touches), next(iter(scope._touches))) == (1200 - 512, 10_513)
    assert 10_000 in scope._touches
    scope.write_pending(1.0)
    assert not scope.pending
