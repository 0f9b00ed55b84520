"""A store whose structure is damaged is written anew: what the damage can't have touched is all there, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import CheckpointPolicy, Layout, Store
from kvstore.errors import CapError, StoreDamagedError
from kvstore.records.meta import NamespaceRecord
from tests.repair.conftest import SESSIONS, TURNS
from tests.repair.damage import LEAF, PAGE, pages_of, pages_with, repaired, restored_after_all, write_at, zero
from tests.store.index import checkpoints_on
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    data_file,
    flip,
    hybrid_layout,
    plain_layout,
    restored,
    save,
    wide_layout,
)


def lengths(path: Path) -> list[int]:
    """Restore every session that was saved; give how far each goes."""
    with Store.open(path) as store:
        namespaces = [store.namespace(plain_layout()), store.namespace(hybrid_layout()), store.namespace(plain_layout(), salt=b"x")]
        found = [restored_after_all(namespace, tokens) for namespace in namespaces for tokens in SESSIONS]
        return found + [restored_after_all(namespaces[1], tokens) for tokens in TURNS]


def test_lost_meta_pages(whole: Path, copy: Path) -> None:
    """Without both meta pages the newest snapshot is found again by what it consists of: everything is kept."""
    zero(copy, 0, 2)
    with pytest.raises(StoreDamagedError):
        Store.open(copy)
    before = data_file(copy).read_bytes()
    repaired(copy)
    assert lengths(copy) == lengths(whole)
    aside = list(copy.parent.glob("s.damaged-*"))
    assert len(aside) == 1
    assert aside[0].stat().st_mode & 0o777 == 0o700
    assert (aside[0] / "data.mdb").read_bytes() == before
    assert sorted(os.listdir(copy)) == ["data.mdb", "lock.mdb", "open.lock", "write.lock"]
    assert data_file(copy).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("page", [0, 1])
def test_one_lost_meta_page(whole: Path, copy: Path, page: int) -> None:
    """Without one of its meta pages a store loses nothing, be it the newer one."""
    zero(copy, page)
    repaired(copy)
    assert lengths(copy) == lengths(whole)


def test_each_page_of_the_index(whole: Path, copy: Path) -> None:
    """Each leaf page of a tree that is lost costs what stood in it at most, and the store works on."""
    expected = lengths(whole)
    raw = data_file(whole).read_bytes()
    outcomes = []
    for page in pages_of(whole, LEAF):
        data_file(copy).write_bytes(raw)
        zero(copy, page)
        if Store.repair(copy).ok:
            continue
        found = lengths(copy)
        assert all(a <= b for a, b in zip(found, expected, strict=True))
        outcomes.append(found == expected)
        with Store.open(copy) as store:
            assert_sound(store)
            save(store.namespace(plain_layout()), SESSIONS[-1])
            assert_restores(store.namespace(plain_layout()), SESSIONS[-1], len(SESSIONS[-1]))
    assert outcomes.count(True) >= len(outcomes) - 2  # nodes and layouts stand nowhere else


def test_the_identity_survives(copy: Path) -> None:
    """A repaired store has the same identity, with the next generation of its file."""
    with Store.open(copy) as store:
        before = store.namespace(plain_layout()).scope.store.environment.record
    zero(copy, 0, 2)
    repaired(copy)
    with Store.open(copy) as store:
        after = store.namespace(plain_layout()).scope.store.environment.record
    assert (after.store_id, after.cap, after.page_bytes, after.created) == (
        before.store_id,
        before.cap,
        before.page_bytes,
        before.created,
    )
    assert after.generation == before.generation + 1


def test_a_damaged_identity(whole: Path, copy: Path) -> None:
    """Without the record that says what the store is, its cap is that of the map, and everything is kept."""
    with Store.open(copy) as store:
        record = store.namespace(plain_layout()).scope.store.environment.record.encode()
    for page in pages_with(copy, record):
        at = page * PAGE + data_file(copy).read_bytes()[page * PAGE : (page + 1) * PAGE].index(record)
        flip(data_file(copy), at + 20)
    with pytest.raises(StoreDamagedError, match="identity"):
        Store.open(copy)
    repaired(copy)
    assert lengths(copy) == lengths(whole)
    with Store.open(copy) as store:
        assert store.max_bytes == CAP


@pytest.mark.parametrize("layout", [plain_layout(), hybrid_layout()])
def test_a_lost_layout(whole: Path, copy: Path, layout: Layout) -> None:
    """A namespace whose layout is lost everywhere loses its sessions, and says so; given layout and salt it keeps them."""
    with Store.open(copy) as store:
        scope = store.namespace(layout).scope
        with scope.store.environment.reading() as txn:
            name = NamespaceRecord.decode(scope.namespace, txn.get(scope.namespace, txn.db.namespaces) or b"").encode()
    for page in pages_with(copy, name):
        at = data_file(copy).read_bytes()[page * PAGE : (page + 1) * PAGE].index(name)
        flip(data_file(copy), page * PAGE + at + 50)
    told = Store.repair(copy, dry_run=True)
    assert any("layout" in problem for problem in told.problems)
    assert told.sessions_lost > 0 or told.nodes_lost > 0
    repaired(copy, namespaces=[(layout, b"")])
    assert lengths(copy) == lengths(whole)


def test_recency_survives(tmp_path: Path) -> None:
    """A repaired store evicts what was used longest ago before the damage, and not what was written first afterwards."""
    path = tmp_path / "s"
    sessions = [[n, *range(90)] for n in range(8)]
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        for tokens in sessions:
            save(namespace, tokens)
        for n in (5, 2):  # so they are the ones used last
            with namespace.lease(sessions[n]) as lease:
                assert lease
        save(namespace, sessions[2])
    zero(path, 0, 2)
    repaired(path)
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        evicted: list[int] = []
        while len(evicted) < 8:
            store.evict(free_bytes=1)
            evicted += [n for n in range(8) if n not in evicted and namespace.match(sessions[n]) is None]
        assert evicted == [0, 1, 3, 4, 6, 7, 5, 2]


@pytest.mark.parametrize("bit", [22, 25, 34, 43, 56, 63])
def test_a_bit_of_the_map_size(whole: Path, copy: Path, bit: int) -> None:
    """A bit that flips in the size of the map would lift the cap, or lower it: the store is refused, and repaired with its cap."""
    raw = data_file(copy).read_bytes()
    newer = max((0, 1), key=lambda page: int.from_bytes(raw[page * PAGE + 144 :][:8], "little"))
    flip(data_file(copy), newer * PAGE + 32 + bit // 8, 1 << bit % 8)
    with pytest.raises(StoreDamagedError, match="meta pages"):
        Store.open(copy)
    repaired(copy)
    with Store.open(copy) as store:
        assert store.max_bytes == CAP
    assert lengths(copy) == lengths(whole)


@pytest.mark.parametrize("number", [1 << 47, (1 << 60) + 1, (1 << 63) + 5, (1 << 64) - 2])
def test_numbers_of_pages_that_no_file_has(whole: Path, copy: Path, number: int) -> None:
    """Meta pages that lead far behind the file's end are damaged ones: what they led to is found in another way."""
    for page in (0, 1):
        for at in (128, 136):  # the root of the main tree, the last page
            write_at(copy, page * PAGE + at, number.to_bytes(8, "little"))
    repaired(copy)
    assert lengths(copy) == lengths(whole)


def test_a_second_block_size_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a repair says is kept is there afterwards, also where a block size that comes last lowers how full the store may be."""
    path = tmp_path / "s"
    sessions = [[n, *range(1, 128)] for n in range(220)]
    with Store.open(path, max_bytes=128 << 20) as store:
        large = store.namespace(wide_layout(block_tokens=128))
        for tokens in sessions:
            save(large, tokens)
        monkeypatch.setattr("kvstore.radix.remove._NODES_AT_ONCE", 1)
        save(store.namespace(wide_layout()), [7])
        monkeypatch.undo()
        assert sum(restored(large, tokens) == 128 for tokens in sessions) > 200  # which are the ones used last
        stats = store.stats()
        assert stats.live_bytes > stats.limit_bytes
    zero(path, 0, 2)
    done = Store.repair(path)
    with Store.open(path) as store:
        large = store.namespace(wide_layout(block_tokens=128))
        found = sum(restored(large, tokens) == 128 for tokens in sessions)
        assert found + (store.namespace(wide_layout()).match([7]) is not None) == done.sessions_kept
        assert found == stats.nodes - 1
        assert_sound(store)


@pytest.mark.parametrize(("share", "least"), [(0.2, 0), (0.5, 0), (0.9, 0), (0.98, 50)])
def test_a_truncated_file(tmp_path: Path, share: float, least: int) -> None:
    """Of a file that was cut off, sessions keep what lies before the cut, as long as the index does; the store works on."""
    path = tmp_path / "s"
    layout = wide_layout(1024, 16)
    sessions = [[n, *range(150)] for n in range(60)]
    with Store.open(path, max_bytes=128 << 20) as store:
        for tokens in sessions:
            save(store.namespace(layout), tokens)
        save(store.namespace(layout, salt=b"last"), list(range(500)))  # what the cut hits first
    os.truncate(data_file(path), int(data_file(path).stat().st_size * share))
    repaired(path)
    with Store.open(path) as store:
        found = [restored_after_all(store.namespace(layout), tokens) for tokens in sessions]
        assert sum(length == 151 for length in found) >= least
        save(store.namespace(layout), sessions[0])
        assert_restores(store.namespace(layout), sessions[0], 151)


def test_a_branch_page(tmp_path: Path) -> None:
    """A lost branch page costs nothing: the leaves below it are known by being neither free nor anything else."""
    path = tmp_path / "s"
    layout = wide_layout(64, 128)
    sessions = [[n, *range(n % 7, 900)] for n in range(30)]
    with Store.open(path, max_bytes=64 << 20) as store:
        for tokens in sessions:
            save(store.namespace(layout), tokens)
    raw = data_file(path).read_bytes()
    branches = pages_of(path, 0x01)
    damaged = 0
    for page in branches:
        data_file(path).write_bytes(raw)
        for at in (17, 19, 21, PAGE - 16, PAGE - 40):  # where nodes lie, and nodes
            flip(data_file(path), page * PAGE + at)
        damaged += bool(Store.repair(path, dry_run=True).problems)
        repaired(path)
        with Store.open(path) as store:
            assert [restored_after_all(store.namespace(layout), tokens) for tokens in sessions] == [len(t) for t in sessions]
    assert damaged


def test_nothing_left(copy: Path) -> None:
    """A file of zeros is moved aside for an empty store, if somebody says what its cap was; else it is left as it is."""
    size = data_file(copy).stat().st_size
    write_at(copy, 0, bytes(size))
    with pytest.raises(CapError, match="max-bytes"):
        Store.repair(copy)
    assert data_file(copy).read_bytes() == bytes(size)
    assert repaired(copy, max_bytes=CAP) == 0
    assert len(list(copy.parent.glob("s.damaged-*"))) == 1
    with Store.open(copy) as store:
        save(store.namespace(plain_layout()), SESSIONS[0])


def test_a_dry_run_changes_nothing(copy: Path) -> None:
    """A dry run says what a repair would keep and leaves every byte as it is."""
    zero(copy, 0, 2)
    before = data_file(copy).read_bytes()
    told = Store.repair(copy, dry_run=True)
    assert not told.ok
    assert not told.changed
    assert data_file(copy).read_bytes() == before
    assert os.listdir(copy.parent) == ["s"]
    done = Store.repair(copy)
    assert (done.sessions_kept, done.nodes_kept, done.tokens_kept) == (told.sessions_kept, told.nodes_kept, told.tokens_kept)
    assert done.kept_bytes == told.kept_bytes


def test_checkpoints_are_kept(copy: Path) -> None:
    """All checkpoints that a session had are there after a repair, so it is restored where it was before."""
    with Store.open(copy) as store:
        before = checkpoints_on(store.namespace(hybrid_layout()), TURNS[-1])
    assert len(before) >= 2
    zero(copy, 0, 2)
    repaired(copy)
    with Store.open(copy) as store:
        assert checkpoints_on(store.namespace(hybrid_layout()), TURNS[-1]) == before


def test_checkpoints_of_another_policy_are_kept(tmp_path: Path) -> None:
    """A repair doesn't know by which policy checkpoints were kept: all that are there stay, and the next save goes by its own."""
    path = tmp_path / "s"
    tokens, policy = list(range(60)), CheckpointPolicy(every=8)
    with Store.open(path, max_bytes=CAP) as store:
        for position in range(5, 60, 7):
            save(store.namespace(hybrid_layout(), checkpoints=policy), tokens[:position])
        before = checkpoints_on(store.namespace(hybrid_layout()), tokens)
    assert len(before) > 5
    zero(path, 0, 2)
    repaired(path)
    with Store.open(path) as store:
        assert checkpoints_on(store.namespace(hybrid_layout()), tokens) == before
        save(store.namespace(hybrid_layout()), tokens)
        assert checkpoints_on(store.namespace(hybrid_layout()), tokens) == [before[-1], 60]


def test_a_full_store(tmp_path: Path) -> None:
    """A store that was full keeps what fits without evicting anything: the sessions used last, all but the very oldest."""
    path = tmp_path / "s"
    layout = wide_layout(4096, 16)
    sessions = [[n, *range(60)] for n in range(90)]
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        for tokens in sessions:
            save(namespace, tokens)
        before = [n for n, tokens in enumerate(sessions) if namespace.match(tokens) is not None]
    assert len(before) < 60
    zero(path, 0, 2)
    repaired(path)
    with Store.open(path) as store:
        namespace = store.namespace(layout)
        after = [n for n, tokens in enumerate(sessions) if restored_after_all(namespace, tokens) == 61]
    assert after == before[-len(after) :]
    assert len(after) >= len(before) - 2
