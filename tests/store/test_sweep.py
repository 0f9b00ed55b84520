"""Setting the index right: numbers are never used twice, namespaces keep their one root, what is owed is not forgotten."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore import Namespace, Store
from kvstore.eviction import evict_point
from kvstore.radix import sweep
from kvstore.records.meta import COUNTERS_KEY, SWEEP_KEY
from kvstore.records.node import child_key, node_key
from tests.support import CAP, assert_restores, assert_sound, hybrid_layout, plain_layout, save

from .index import all_nodes, nodes_on

P = [1] * 24
Q = [2] * 24
X = [5] * 24


def spoil(store: Store, database: str, key: bytes) -> None:
    """Flip a bit of a record, so that it fails its checksum."""
    with store._scope.environment.write(5.0) as txn:
        handle = getattr(txn.db, database)
        raw = bytearray(txn.get(key, handle) or b"")
        raw[-1] ^= 1
        txn.put(handle, key, bytes(raw))


def evict(store: Store, node: int) -> None:
    """Evict one node, as making room would."""
    scope = store._scope
    scope.transact(lambda txn: evict_point(txn, node, frozenset(), scope.stateful(txn)))


def test_a_number_is_not_used_twice(store: Store) -> None:
    """With the counters lost, a new node never gets a number under which children of a lost one still hang."""
    namespace = store.namespace(plain_layout())
    save(namespace, P + X)
    save(namespace, P + [6] * 24)
    upper = nodes_on(namespace, P + X)[0]
    evict(store, nodes_on(namespace, P + [6] * 24)[-1].node)
    spoil(store, "nodes", node_key(upper.node))
    spoil(store, "meta", COUNTERS_KEY)
    evict(store, upper.node)
    save(namespace, Q)
    assert_restores(namespace, Q + X, len(Q))
    save(namespace, Q + X)
    assert_restores(namespace, Q + X, len(Q + X))


@pytest.mark.parametrize("database", ["namespaces", "roots"])
def test_a_namespace_keeps_its_root(path: Path, database: str) -> None:
    """A namespace whose record or whose root's record is damaged loses no session, whoever knows which root."""
    with Store.open(path, max_bytes=CAP) as store:
        knows = store.namespace(plain_layout())
        save(knows, P)
        key = knows.namespace_id if database == "namespaces" else knows.scope._root.to_bytes(8, "big")
        if not knows.scope._root:
            knows.match(P)
            key = knows.namespace_id if database == "namespaces" else knows.scope._root.to_bytes(8, "big")
        spoil(store, database, key)
        fresh = store.namespace(plain_layout())
        save(fresh, Q)
        save(knows, X)
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        for tokens in (P, Q, X):
            assert_restores(namespace, tokens, len(tokens))
        assert store.stats().namespaces == 1
        assert_sound(store)


def test_what_is_owed_is_noted_in_the_store(path: Path) -> None:
    """A sweep that could not be done at once is done later, by another process or after a reopening as well."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        for tokens in (P, Q, X):
            save(namespace, tokens)
        for tokens in (P, Q):
            node = nodes_on(namespace, tokens)[0].node
            spoil(store, "nodes", node_key(node))
            store._scope._sweep_after = float("inf")
            evict(store, node)
        with store._scope.environment.reading() as txn:
            assert txn.get(SWEEP_KEY, txn.db.meta) is not None
        assert store.stats().blocks > len(all_nodes(namespace)) * 2
    with Store.open(path) as store:
        save(store.namespace(plain_layout()), [7] * 5)
        with store._scope.environment.reading() as txn:
            assert txn.get(SWEEP_KEY, txn.db.meta) is None
        assert_sound(store)


def test_a_sweep_of_a_sound_store_changes_nothing(store: Store) -> None:
    """Sweeping a store in which everything agrees removes and corrects nothing, incomplete checkpoints and all."""
    namespace = store.namespace(hybrid_layout())
    for tokens in (P, P + X, P + Q, Q + X):
        save(namespace, tokens)
    with store._scope.environment.write(5.0) as txn:
        swept = sweep(txn)
    assert (swept.records, swept.counts) == (0, 0)
    for tokens in (P, P + X, P + Q, Q + X):
        assert_restores(namespace, tokens, len(tokens))


def test_an_orphan_takes_nothing_from_the_living(store: Store) -> None:
    """Evicting what damage has cut off drops no checkpoint of the sessions that go on above it."""
    namespace = store.namespace(hybrid_layout())
    stem = [1] * 32
    save(namespace, stem)
    save(namespace, [*stem, *[9] * 16])
    branch = [*stem, *[4] * 16]
    save(namespace, branch)
    save(namespace, [*branch, *[5] * 16])
    save(namespace, [*branch, *[6] * 16])
    save(namespace, [*branch, *[5] * 32])
    top = nodes_on(namespace, stem)[0]
    spoil(store, "children", child_key(top.node, 4))
    store._scope._sweep_after = float("inf")
    live = [*stem, *[4] * 8]
    save(namespace, live, states=False)
    before = namespace.match(live)
    assert before is not None
    for node in sorted(all_nodes(namespace), key=lambda node: -node.end):
        if node.start >= 48:
            evict(store, node.node)
    assert namespace.match(live) == before
    store._scope._sweep_after = float("-inf")
    save(namespace, [8] * 5)  # a later write does what is owed, and everything agrees again


def _leases(namespace: Namespace, stop: threading.Event) -> None:
    while not stop.is_set():
        with namespace.lease(P):
            pass


def test_leases_come_and_go_beside_saves(store: Store) -> None:
    """Leases that other threads take and end while a save looks for overdue ones disturb it not."""
    namespace = store.namespace(plain_layout())
    save(namespace, P)
    stop = threading.Event()
    threads = [threading.Thread(target=_leases, args=(namespace, stop), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(150):
            save(namespace, [3, n, *Q])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert_restores(namespace, [3, 149, *Q], len(Q) + 2)


def test_everything_is_evicted_beside_writers_that_give_up(store: Store) -> None:
    """Evicting everything does so, although other threads' writes fail and make the ranking stale meanwhile."""
    namespace = store.namespace(plain_layout())
    for n in range(40):
        save(namespace, [n, *P])
    stop = threading.Event()

    def stale() -> None:
        while not stop.is_set():
            store._scope._victims.forget()

    thread = threading.Thread(target=stale, daemon=True)
    thread.start()
    try:
        store.evict(free_bytes=1 << 40)
    finally:
        stop.set()
        thread.join()
    assert store.stats().nodes == 0
