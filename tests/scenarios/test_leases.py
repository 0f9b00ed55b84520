"""A lease that is held for long while the cap forces eviction."""

from __future__ import annotations

import logging
import threading

import pytest

from kvstore import Store
from kvstore.env import MapFull, Writer
from kvstore.errors import SpacePinned
from tests.support import assert_restores, assert_sound, save, wide_layout

from .conftest import Acting

SETUP = "namespace = store.namespace(wide_layout())"


def session(n: int) -> list[int]:
    """A session of its own."""
    return [1000 + n, *range(1, 200)]


def test_a_lease_is_held_while_the_cap_forces_eviction(
    store: Store, actor: Acting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a long lease saves evict what they need, then are refused by name with nothing evicted for it; the rest is as ever."""
    namespace, writer = store.namespace(wide_layout()), actor(SETUP)
    n = 0
    while writer.do("store.stats().counters.evicted_nodes") == "0":  # full to the cap
        n += 1
        assert writer.do(f"save(namespace, {session(n)}).tokens") == "200"
    held = next(session(k) for k in range(n + 1) if namespace.match(session(k)) is not None)
    with namespace.lease(held) as lease:
        assert lease.length == 200
        views = [view.copy() for view in lease.views("kv")]
        # what is leased was used least recently as others see it, so it leaves the index; at last nothing that goes can be used
        first = n
        while True:
            n += 1
            writer.start(f"save(namespace, {session(n)}).tokens")
            if not (line := writer.next()).startswith("did"):
                break
            assert n < first + 100
        assert "SpacePinned" in line
        assert "lease" in line
        assert n > first + 1
        assert_restores(namespace, held, 0)
        assert store.stats().readers_pinning
        # refused once more, here: nothing goes for it
        there = [k for k in range(n) if namespace.match(session(k)) is not None]
        before = store.stats()
        monkeypatch.setattr("kvstore.leases.pin.LEASE_AGE_LIMIT", 0.0)
        with pytest.raises(SpacePinned, match="nothing was evicted"), caplog.at_level(logging.WARNING, "kvstore"):
            save(namespace, session(500))
        monkeypatch.undo()
        after = store.stats()
        assert [k for k in range(n) if namespace.match(session(k)) is not None] == there
        assert (after.nodes, after.counters.evicted_nodes) == (before.nodes, before.counters.evicted_nodes)
        assert after.counters.refused_saves == 1
        # what happened is reported, once
        assert after.counters.overdue_leases == 1
        assert sum("a lease has been held" in record.getMessage() for record in caplog.records) == 1
        # readable, here and there, and what is leased is there to the last byte
        assert len(there) > 5
        for k in there:
            assert_restores(namespace, session(k), 200)
        assert writer.do(f"restored(namespace, {session(there[-1])})") == "200"
        assert_sound(store)
        lease.validate()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(views, lease.views("kv"), strict=True))
    assert writer.do(f"save(namespace, {session(500)}).tokens") == "200"  # the space came back by itself
    for k in range(600, 630):
        save(namespace, session(k))
    assert_restores(namespace, session(629), 200)
    assert store.stats().counters.overdue_leases == 1


def test_readers_that_only_pass_refuse_no_save(store: Store) -> None:
    """Where one reader or another is always passing while others write, a save that finds no run of pages evicts like any other."""
    namespace, environment = store.namespace(wide_layout()), store._scope.environment
    for n in range(5):
        save(namespace, session(n))
    done = threading.Event()

    def passing() -> None:
        while not done.is_set():
            with environment.reading():
                with environment.write(20.0, durable=False) as txn:  # it is older than what is committed from here on
                    txn.put(txn.db.meta, b"tests", b"")
                done.wait(0.02)

    tries = []

    def work(txn: Writer) -> None:
        tries.append(txn.transaction)
        if len(tries) <= 5:
            raise MapFull("free space is broken up")

    readers = [threading.Thread(target=passing) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        store._scope.transact(work)
    finally:
        done.set()
        for reader in readers:
            reader.join()
        with environment.write(20.0) as txn:
            txn.delete(txn.db.meta, b"tests")
    assert len(tries) == 6
    assert store.stats().counters.evicted_nodes
