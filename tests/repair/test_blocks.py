"""A store whose structure is sound is repaired in place: what is damaged goes, with what can't be reached past it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Store
from kvstore import blocks as table
from kvstore.radix import nodes
from kvstore.records.meta import COUNTERS_KEY
from kvstore.records.node import node_key
from tests.repair.conftest import SESSIONS, TURNS
from tests.repair.damage import repaired, restored_after_all
from tests.store.index import checkpoints_on, nodes_on
from tests.support import CAP, assert_restores, assert_sound, data_file, flip, hybrid_layout, plain_layout, save, wide_layout


def payloads(path: Path, tokens: list[int]) -> list[int]:
    """Give where the payloads of a plain session lie."""
    with Store.open(path) as store, store.namespace(plain_layout()).lease(tokens) as lease:
        return [block.file_offset for block in lease.blocks]


def test_a_sound_store(copy: Path) -> None:
    """There is nothing to repair in a sound store, and not a byte of it changes."""
    with Store.open(copy) as store:
        assert_sound(store)
    before = data_file(copy).read_bytes()
    done = Store.repair(copy)
    assert done.ok
    assert not done.changed
    assert done.moved_to == ""
    assert done.sessions_lost == done.nodes_lost == done.tokens_lost == done.blocks_lost == 0
    assert data_file(copy).read_bytes() == before


@pytest.mark.parametrize("into", [-4000, 0, 100])
def test_a_damaged_block(copy: Path, into: int) -> None:
    """A byte flipped in a block's header or payload costs its session what lies from there on, and no other session anything."""
    tokens = SESSIONS[4]
    flip(data_file(copy), payloads(copy, tokens)[2] + into)
    told = Store.repair(copy, dry_run=True)
    assert not told.ok
    done = Store.repair(copy)
    assert not done.rewritten
    assert done.moved_to == ""
    assert done.blocks_lost > 0
    repaired(copy)
    with Store.open(copy) as store:
        namespace = store.namespace(plain_layout())
        assert store.stats().bad_blocks == 0
        assert_restores(namespace, tokens, 32)
        for other in SESSIONS:
            if other[0] != tokens[0]:
                assert_restores(namespace, other, len(other))
            assert_restores(store.namespace(hybrid_layout()), other, len(other))
        save(namespace, tokens)
        assert_restores(namespace, tokens, len(tokens))


def test_a_damaged_tail_and_a_block_that_two_sessions_share(tmp_path: Path) -> None:
    """Sessions that branch inside a damaged block both end before it."""
    path = tmp_path / "s"
    stem = list(range(40))
    with Store.open(path, max_bytes=16 << 20) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, [*stem, *range(60)])
        save(namespace, [*stem, 9, *range(60)])
        save(namespace, [8, *range(20)])
        with namespace.lease([*stem, *range(60)]) as lease:
            at = lease.blocks[2].file_offset
    flip(data_file(path), at + 3)
    repaired(path)
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        # the branch has a block of its own for the rows behind the stem, but nothing leads there any more
        assert_restores(namespace, [*stem, *range(60)], 32)
        assert_restores(namespace, [*stem, 9, *range(60)], 32)
        assert_restores(namespace, [8, *range(20)], 21)


def test_damaged_states(copy: Path) -> None:
    """A damaged block of states costs its checkpoint; the session goes back to the one before."""
    with Store.open(copy) as store:
        namespace = store.namespace(hybrid_layout())
        positions = checkpoints_on(namespace, TURNS[-1])
        found = (c for node in nodes_on(namespace, TURNS[-1]) for c in node.checkpoints)
        states = next(c.ids[0] for c in found if c.position == positions[-1])
        environment = namespace.scope.store.environment
        with environment.reading() as txn:
            ref = table.find(txn, states)
            assert ref is not None
    flip(data_file(copy), ref.offset + 70)
    repaired(copy)
    with Store.open(copy) as store:
        assert restored_after_all(store.namespace(hybrid_layout()), TURNS[-1]) == positions[-2]


@pytest.mark.parametrize("database", ["nodes", "children", "usage", "refs", "namespaces", "roots", "meta"])
def test_a_damaged_record(copy: Path, database: str) -> None:
    """A record that fails its checks in a sound file: everything else is kept, and the store verifies again."""
    with Store.open(copy) as store:
        environment = store.namespace(plain_layout()).scope.store.environment
        with environment.write(1.0) as txn:
            handle = getattr(txn.db, database)
            key, raw = next(item for item in txn.items(handle) if item[0] != b"format")
            if database == "meta":
                key, raw = COUNTERS_KEY, txn.get(COUNTERS_KEY, handle) or b""
            txn.put(handle, key, raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    repaired(copy)
    with Store.open(copy) as store:
        lengths = [
            restored_after_all(store.namespace(layout), tokens)
            for layout in (plain_layout(), hybrid_layout())
            for tokens in SESSIONS
        ]
        lost = sum(length < len(tokens) for length, tokens in zip(lengths, SESSIONS * 2, strict=True))
        assert lost == 0 or (database in ("nodes", "children", "refs") and lost <= 3)
        save(store.namespace(plain_layout()), SESSIONS[0])
        assert_restores(store.namespace(plain_layout()), SESSIONS[0], len(SESSIONS[0]))


def test_a_cut_in_the_middle_of_a_long_session(tmp_path: Path) -> None:
    """What is cut off gives its space back, node by node."""
    path = tmp_path / "s"
    layout = wide_layout(256, 64)
    tokens = list(range(12000))
    with Store.open(path, max_bytes=64 << 20) as store:
        namespace = store.namespace(layout)
        save(namespace, tokens)
        save(namespace, [*tokens[:9000], 1, 2, 3])
        before = store.stats()
        with namespace.lease(tokens) as lease:
            flip(data_file(path), lease.blocks[70].file_offset + 9)
    repaired(path)
    with Store.open(path) as store:
        assert_restores(store.namespace(layout), tokens, 70 * 64)
        after = store.stats()
        assert after.blocks == 70
        assert after.live_bytes < before.live_bytes / 2
        with store.namespace(layout).scope.store.environment.reading() as txn:
            assert txn.get(node_key(1), txn.db.nodes) is None


def test_a_block_that_could_not_be_freed(tmp_path: Path) -> None:
    """What could not be freed when it went, and can be now, is freed where it is: nothing is written anew for it."""
    path = tmp_path / "s"
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, [1, *range(63)])
        with store._scope.environment.write(5.0) as txn:  # as it is left where its first page can't be read
            block_id = txn.last_key(txn.db.refs)
            ref = table.find(txn, block_id)
            assert ref is not None
            txn.put(txn.db.refs, block_id, ref.counted(-1).encode(block_id))
            [number] = [int.from_bytes(key, "big") for key, _ in txn.items(txn.db.nodes)]
            node = nodes.load(txn, number)
            for database in (txn.db.nodes, txn.db.usage):
                txn.delete(database, node_key(number))
            nodes.unlink(txn, node.parent, node.first, number)
            nodes.drop_root(txn, node.root)
            table.mark_bad(txn, block_id)
        [problem] = store.verify().problems
        assert "can't be freed" in problem.what
    told, done = Store.repair(path, dry_run=True), Store.repair(path)
    assert (told.rewritten, done.rewritten, done.changed) == (False, False, True)
    with Store.open(path) as store:
        assert store.stats().blocks == store.stats().bad_blocks == 0
        assert_sound(store)
