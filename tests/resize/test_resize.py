"""Changing a store's cap: up in place, down by eviction and a compaction."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import CapError, StoreBusyError, StoreDamagedError, StoreFullError
from kvstore.store.resize import resize
from tests.support import assert_restores, assert_sound, child_at, restored, save, wide_layout

MIB = 1 << 20
SESSIONS = [[n] + [(n * 7 + i) % 50 for i in range(399)] for n in range(12)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 32 MiB with twelve sessions of 1.6 MB each, the first saved first."""
    with Store.open(tmp_path / "s", max_bytes=32 * MIB) as store:
        namespace = store.namespace(wide_layout())
        for tokens in SESSIONS:
            save(namespace, tokens)
    return tmp_path / "s"


def test_raising_keeps_everything_and_makes_room(path: Path) -> None:
    """A raised cap holds from then on: nothing is lost, and the file may grow past the old cap."""
    with Store.open(path) as store:
        assert store.resize(64 * MIB).max_bytes == store.max_bytes == 64 * MIB
    with Store.open(path, max_bytes=64 * MIB) as store:
        namespace = store.namespace(wide_layout())
        for tokens in SESSIONS:
            assert_restores(namespace, tokens, len(tokens))
        for n in range(100, 112):
            save(namespace, [n, *SESSIONS[0][1:]])
        assert store.stats().file_bytes > 32 * MIB
        assert store.stats().file_bytes <= 64 * MIB
        assert store.stats().counters.evicted_nodes == 0
        assert_sound(store)


def test_lowering_evicts_the_oldest_and_shrinks_the_file(path: Path) -> None:
    """A lowered cap holds at once: the sessions used last are there, byte for byte, and the file is smaller than the cap."""
    with Store.open(path) as store:
        assert store.resize(12 * MIB).file_bytes <= 12 * MIB
    assert sorted(os.listdir(path.parent)) == ["s"]
    with Store.open(path) as store:
        assert store.max_bytes == 12 * MIB
        assert_sound(store)
        namespace = store.namespace(wide_layout())
        lengths = [restored(namespace, tokens) for tokens in SESSIONS]
        assert lengths[-4:] == [400] * 4
        assert lengths[0] == 0
        save(namespace, [77, *SESSIONS[0][1:]])
        assert_restores(namespace, [77, *SESSIONS[0][1:]], 400)
        assert store.stats().file_bytes <= 12 * MIB
        assert_sound(store)


def test_refused_while_open_in_this_process(path: Path) -> None:
    """A store that this process has open is not resized."""
    with Store.open(path), pytest.raises(StoreBusyError, match="open in this process"):
        resize(path, 64 * MIB)
    resize(path, 64 * MIB)
    with Store.open(path) as store:
        assert store.max_bytes == 64 * MIB


def test_refused_while_open_in_another_process(path: Path) -> None:
    """A store that another process has open is not resized, and that process is not disturbed."""
    code = """
        store = Store.open(path)
        print("open", flush=True)
        sys.stdin.readline()
        print(restored(store.namespace(wide_layout()), [11] + [(11 * 7 + i) % 50 for i in range(399)]), flush=True)
    """
    with child_at(code, path) as other:
        with pytest.raises(StoreBusyError, match="another process"):
            resize(path, 12 * MIB, lock_timeout=0.2)
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline().strip() == "400"
    with Store.open(path) as store:
        assert store.max_bytes == 32 * MIB


def test_too_small_is_refused_and_changes_nothing(path: Path) -> None:
    """A cap in which a store cannot work is refused by name, and the old one holds."""
    with pytest.raises(CapError, match="at least"):
        resize(path, 100_000)
    with Store.open(path, max_bytes=32 * MIB) as store:
        assert_sound(store)
        assert_restores(store.namespace(wide_layout()), SESSIONS[3], 400)


def test_another_cap_at_opening_names_the_call(path: Path) -> None:
    """Opening with another cap than the stored one is refused, and the message names the call that changes it."""
    with pytest.raises(CapError, match=r"Store\.resize"):
        Store.open(path, max_bytes=64 * MIB)


def test_what_a_killed_resize_left_is_removed(path: Path) -> None:
    """The copy that a killed resize has left beside the store goes with the next resize, and nothing else beside it does."""
    beside = path.parent / ".s.resize"
    beside.mkdir(mode=0o700)
    (beside / "data.mdb").write_bytes(b"half a copy")
    (path.parent / "other").write_text("kept")
    resize(path, 12 * MIB)
    assert sorted(os.listdir(path.parent)) == ["other", "s"]


def test_a_kill_at_any_instant_leaves_one_store_or_the_other(path: Path) -> None:
    """A resize killed at random instants leaves the old store or the new one, whole; the next one succeeds."""
    code = """
        from kvstore.store.resize import resize
        print("go", flush=True)
        resize(path, int(sys.argv[2]))
        print("done", flush=True)
        time.sleep(60)
    """
    caps = [12 * MIB, 32 * MIB]
    for n in range(8):
        with child_at(code, path, str(caps[n % 2])) as resizer:
            time.sleep(0.004 * n)
            resizer.kill()
        with Store.open(path) as store:
            assert store.max_bytes in caps
            assert_sound(store)
            assert_restores(store.namespace(wide_layout()), SESSIONS[-1], 400)


def test_a_replaced_file_is_not_written_to(path: Path) -> None:
    """A process whose store file was replaced refuses to write into the file that has no name any more."""
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        copy = path.parent / "copy"
        copy.write_bytes((path / "data.mdb").read_bytes())
        copy.replace(path / "data.mdb")
        with pytest.raises(StoreDamagedError, match="replaced"):
            save(namespace, [99, *SESSIONS[0][1:]])
        assert_restores(namespace, SESSIONS[-1], 400)


def test_a_refused_lowering_evicts_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for the copy, lowering the cap is refused before anything is evicted for it."""
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(StoreFullError, match="free there"):
        resize(path, 12 * MIB)
    monkeypatch.undo()
    with Store.open(path) as store:
        assert store.max_bytes == 32 * MIB
        for tokens in SESSIONS:
            assert_restores(store.namespace(wide_layout()), tokens, 400)


def test_nobody_shares_a_store_that_is_being_resized(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that opens the store while another resizes it is refused by name, and what it would have saved is not lost."""
    refused: list[Exception] = []
    whole = shutil.disk_usage

    def look(where: object) -> object:
        try:
            Store.open(path, lock_timeout=0.2).close()
        except StoreBusyError as error:
            refused.append(error)
        return whole(str(where))

    monkeypatch.setattr(shutil, "disk_usage", look)
    resize(path, 16 * MIB)
    assert refused
    monkeypatch.undo()
    with Store.open(path) as store:
        assert_restores(store.namespace(wide_layout()), SESSIONS[-1], 400)
