"""Lifetimes: namespaces that come and go, handles closed under calls that are under way, space after damage."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout, Store, Stream
from kvstore.errors import CapError, StoreClosedError
from kvstore.records.node import child_key, node_key
from tests.support import CAP, assert_restores, assert_sound, plain_layout, run_child, save, wide_layout

from .index import nodes_on

TOKENS = list(range(100))


def test_a_namespace_comes_with_its_first_save(store: Store) -> None:
    """Asking for a namespace, matching and leasing in it write nothing; its first save makes it."""
    namespace = store.namespace(plain_layout(), salt=b"once")
    assert namespace.match(TOKENS) is None
    with namespace.lease(TOKENS) as lease:
        assert not lease
    assert store.stats().namespaces == 0
    save(namespace, TOKENS)
    assert store.stats().namespaces == 1
    assert [info.sessions for info in store.namespaces()] == [1]


def test_a_namespace_goes_with_its_last_session(store: Store) -> None:
    """Salts that are used once leave nothing behind, and a handle on a namespace that has gone finds and makes it anew."""
    kept = store.namespace(plain_layout(), salt=b"kept")
    save(kept, TOKENS)
    for n in range(30):
        once = store.namespace(plain_layout(), salt=str(n).encode())
        save(once, TOKENS)
        once.evict(TOKENS)
    assert store.stats().namespaces == 1
    kept.evict()
    assert store.stats().namespaces == 0
    assert kept.match(TOKENS) is None
    save(kept, TOKENS)
    assert_restores(kept, TOKENS, 100)
    assert_restores(store.namespace(plain_layout(), salt=b"kept"), TOKENS, 100)


def test_another_process_made_the_namespace_anew(path: Path) -> None:
    """A namespace whose root another process has replaced is found by a handle that knew the old one."""
    code = """
        with Store.open(path) as store:
            namespace = store.namespace(plain_layout())
            namespace.evict()
            save(namespace, list(range(40)))
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        run_child(code, path)
        assert_restores(namespace, TOKENS, 40)
        save(namespace, TOKENS)
        assert_restores(namespace, TOKENS, 100)
        assert store.stats().namespaces == 1
        assert_sound(store)


def test_a_salt_for_each_session_under_a_cap(store: Store) -> None:
    """A thousand sessions, each under a salt of its own, turn over in a small store without a refused save."""
    layout = wide_layout(256, 16)
    for n in range(1000):
        save(store.namespace(layout, salt=n.to_bytes(4, "big")), list(range(32)))
    assert store.stats().file_bytes <= CAP
    assert 10 < store.stats().namespaces < 1000
    assert_restores(store.namespace(layout, salt=(999).to_bytes(4, "big")), list(range(32)), 32)


def test_closing_under_a_checking_save(tmp_path: Path) -> None:
    """Closing the last handle while another thread saves and compares ends that save well or with a named error, never a crash."""
    layout = Layout((Stream("kv", "u8", (4096,)),), block_tokens=64, model="big")
    tokens = np.arange(4000, dtype=np.uint32)
    rows = {"kv": np.zeros((4000, 4096), np.uint8)}
    for n in range(6):
        store = Store.open(tmp_path / str(n), max_bytes=64 << 20)
        namespace = store.namespace(layout)
        namespace.save(tokens, rows)
        failures: list[BaseException] = []

        def work(namespace: object = namespace, failures: list[BaseException] = failures) -> None:
            try:
                for _ in range(20):
                    namespace.save(tokens, rows, check=True)  # type: ignore[attr-defined]  # bound early on purpose
            except StoreClosedError:
                pass
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        store.close()
        thread.join(60)
        assert not thread.is_alive()
        assert not failures


def test_the_last_view_dies_in_a_write(tmp_path: Path) -> None:
    """A view that keeps a closed store's file open may die on any thread, in a write transaction as well: nothing hangs."""
    store = Store.open(tmp_path / "s", max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        held = [lease.blocks[0].payload]
    environment = store._scope.environment
    done = threading.Event()

    def work() -> None:
        with environment.write(5.0):
            store.close()
            held.clear()
            gc.collect()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert done.wait(20)
    assert environment.gone.wait(5)
    with Store.open(tmp_path / "s") as again:
        assert_restores(again.namespace(plain_layout()), TOKENS, 100)


def test_opening_and_closing_keeps_nothing(tmp_path: Path) -> None:
    """What a store keeps for its file, buffers among it, goes when the file is closed."""
    from kvstore.scope import StoreScope

    gc.collect()
    before = sum(type(found) is StoreScope for found in gc.get_objects())
    for _ in range(5):
        with Store.open(tmp_path / "s", max_bytes=CAP) as store:
            save(store.namespace(plain_layout()), TOKENS)
    del store
    gc.collect()
    assert sum(type(found) is StoreScope for found in gc.get_objects()) <= before


def test_a_namespace_of_a_closed_handle_says_so(tmp_path: Path) -> None:
    """A namespace ends with the handle that it came from, also while another handle keeps the file open."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as other:
        store = Store.open(tmp_path / "s")
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        store.close()
        for use in (namespace.match, namespace.lease, namespace.evict):
            with pytest.raises(StoreClosedError):
                use(TOKENS)
        assert_restores(other.namespace(plain_layout()), TOKENS, 100)


@pytest.mark.parametrize("cap", [1 << 46, 1 << 47, 1 << 62])
def test_a_cap_that_no_process_can_map(tmp_path: Path, cap: int) -> None:
    """A cap beyond the address space is refused by name, and nothing is created that could not be opened again."""
    with pytest.raises(CapError, match="map"):
        Store.open(tmp_path / "s", max_bytes=cap)
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        assert store.max_bytes == CAP


@pytest.mark.parametrize("what", ["nodes", "children", "refs"])
def test_space_comes_back_after_damage(store: Store, what: str) -> None:
    """What a damaged record of the index cuts off does not cost space for ever: evicting everything leaves nothing."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    save(namespace, [*TOKENS[:40], *[7] * 20])
    upper, lower = nodes_on(namespace, TOKENS)
    key = {
        "nodes": node_key(lower.node),
        "children": child_key(upper.node, lower.first),
        "refs": lower.blocks[:32],
    }[what]
    with store._scope.environment.write(5.0) as txn:
        database = getattr(txn.db, what)
        raw = bytearray(txn.get(key, database) or b"")
        raw[-1] ^= 1
        txn.put(database, key, bytes(raw))
    store.evict(free_bytes=1 << 40)
    store.evict(free_bytes=1 << 40)  # what was set right after the first
    stats = store.stats()
    assert (stats.nodes, stats.blocks) == (0, 0)


def test_sessions_beside_a_damaged_one_go_on(store: Store) -> None:
    """A damaged record of one session fails neither the checkpoints of those that share its prefix nor anybody's eviction."""
    from tests.support import hybrid_layout

    namespace = store.namespace(hybrid_layout())
    save(namespace, [*TOKENS[:40], *[1] * 30])
    save(namespace, [*TOKENS[:40], *[2] * 30])
    leaf = nodes_on(namespace, [*TOKENS[:40], *[1] * 30])[-1]
    with store._scope.environment.write(5.0) as txn:
        raw = bytearray(txn.get(node_key(leaf.node), txn.db.nodes) or b"")
        raw[-1] ^= 1
        txn.put(txn.db.nodes, node_key(leaf.node), bytes(raw))
    for n in range(3, 6):
        tokens = [*TOKENS[:40], *[n] * 30]
        save(namespace, tokens)
        assert_restores(namespace, tokens, len(tokens))
    longer = [*TOKENS[:40], *[2] * 50]
    save(namespace, longer)
    assert_restores(namespace, longer, len(longer))
    store.evict(free_bytes=1 << 40)
    store.evict(free_bytes=1 << 40)
    assert store.stats().nodes == 0
