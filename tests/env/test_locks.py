"""Locks: bounded waits behind stopped processes, none behind dead ones, and lock files that are missed before a write."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import Namespace, Store
from kvstore.env import Environment
from kvstore.env.opening import map_bytes_for
from kvstore.env.pages import read_facts, write_empty
from kvstore.errors import StoreBusyError, StoreDamagedError, WriteLockTimeout
from kvstore.records.constants import DEFAULT_PAGE_BYTES
from tests.support import CAP, assert_restores, assert_sound, child, child_at, hybrid_layout, plain_layout, run_child, save, stop

HOLDER = """
store = Store.open(path)
namespace = store.namespace(plain_layout())
save(namespace, list(range(40)))
with store._scope.environment.write(5.0) as txn:
    txn.put(txn.db.meta, b"half", b"done")
    print("holding", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a store with a namespace."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), list(range(20)))
    return tmp_path / "s"


WRITES: dict[str, Callable[[Store, Namespace], object]] = {
    "save": lambda _, namespace: save(namespace, list(range(50))),
    "evict": lambda _, namespace: namespace.evict(list(range(20))),
    "another namespace": lambda store, _: save(store.namespace(hybrid_layout()), list(range(30))),
}


@pytest.mark.parametrize("use", sorted(WRITES))
def test_a_stopped_writer_is_waited_for_in_vain(path: Path, use: str) -> None:
    """Behind a stopped process that holds the write lock every writing call gives up in bounded time; readers don't wait."""
    with Store.open(path, lock_timeout=0.3) as store:
        namespace = store.namespace(plain_layout())
        with child_at(HOLDER, path) as holder:
            stop(holder)
            began = time.monotonic()
            with pytest.raises(WriteLockTimeout, match="process") as caught:
                WRITES[use](store, namespace)
            assert 0.3 <= time.monotonic() - began < 20
            assert isinstance(caught.value, TimeoutError)
            assert_restores(namespace, list(range(40)), 40)
            assert store.stats().namespaces == 1
        WRITES[use](store, namespace)
        assert_sound(store)


def test_a_store_is_not_opened_behind_a_stopped_writer(path: Path) -> None:
    """Opening a store whose writer is stopped gives up by name in bounded time."""
    with child_at(HOLDER, path) as holder:
        stop(holder)
        with pytest.raises(StoreBusyError) as caught:
            Store.open(path, lock_timeout=0.3)
        assert isinstance(caught.value, TimeoutError)
    with Store.open(path, lock_timeout=0.3) as store:
        assert_sound(store)


def test_closing_does_not_wait_behind_a_stopped_writer(path: Path) -> None:
    """A store that has recency to write closes in bounded time behind a stopped writer, and loses nothing but that."""
    with Store.open(path) as again:
        namespace = again.namespace(plain_layout())
        with child_at(HOLDER, path) as holder:
            assert_restores(namespace, list(range(20)), 20)
            stop(holder)
            again.close()
    with Store.open(path) as once_more:
        assert_restores(once_more.namespace(plain_layout()), list(range(40)), 40)


def test_a_killed_writer_is_no_obstacle(path: Path) -> None:
    """A process killed in the middle of a write leaves nothing of it, and the next writer goes on at once."""
    with Store.open(path, lock_timeout=5.0) as store:
        namespace = store.namespace(plain_layout())
        with child_at(HOLDER, path) as holder:
            holder.kill()
            holder.wait()
            save(namespace, list(range(50)))
        assert_restores(namespace, list(range(50)), 50)
        with store.namespace(plain_layout()).scope.store.environment.reading() as txn:
            assert txn.get(b"half", db=txn.db.meta) is None
        assert_sound(store)


def test_threads_wait_for_each_other_in_bounded_time(path: Path) -> None:
    """A thread that holds the write lock is waited for as long as the limit says, and no longer."""
    with Store.open(path, lock_timeout=0.2) as store:
        namespace = store.namespace(plain_layout())
        environment: Environment = namespace.scope.store.environment
        with environment.write(1.0), pytest.raises(WriteLockTimeout, match="thread"):
            save(namespace, list(range(50)))
        save(namespace, list(range(50)))


@pytest.mark.parametrize("name", ["lock.mdb", "open.lock", "write.lock"])
@pytest.mark.parametrize("anew", [False, True])
def test_a_deleted_lock_file_stops_writing(path: Path, name: str, anew: bool) -> None:
    """When a lock file is deleted or replaced under an open store, the next write is refused with what to do; reading goes on."""
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        (path / name).unlink()
        if anew:
            (path / name).touch(mode=0o600)
        with pytest.raises(StoreDamagedError, match=r"deleted or replaced.*open it again"):
            save(namespace, list(range(50)))
        assert_restores(namespace, list(range(50)), 20)
    with Store.open(path) as store:
        assert_restores(store.namespace(plain_layout()), list(range(50)), 20)
        save(store.namespace(plain_layout()), list(range(50)))
        assert_sound(store)


CREATE = """
print("ready", flush=True)
sys.stdin.readline()
for attempt in range(200):
    try:
        store = Store.open(path, max_bytes=CAP)
        break
    except errors.StoreBusyError:
        time.sleep(0.01)
namespace = store.namespace(plain_layout())
save(namespace, [int(sys.argv[2]), *range(40)])
print(store._scope.environment.record.store_id.hex(), flush=True)
store.close()
"""


@pytest.mark.parametrize("turn", range(3))
def test_processes_that_create_at_once_share_one_store(tmp_path: Path, turn: int) -> None:
    """Processes that create the same store at the same instant end with one store that has what each saved."""
    children = [child(CREATE, tmp_path / "s", str(n)) for n in range(3)]
    try:
        for process in children:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in children:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=60) for process in children]
    finally:
        for process in children:
            process.kill()
            process.communicate()
    assert [process.returncode for process in children] == [0, 0, 0], [err for _, err in results]
    assert len({out for out, _ in results}) == 1
    with Store.open(tmp_path / "s") as store:
        for n in range(3):
            assert_restores(store.namespace(plain_layout()), [n, *range(40)], 41)
        assert_sound(store)


VERIFIER = """
from kvstore.locks import FileLock
lock = FileLock(path + "/open.lock")
assert lock.acquire(exclusive=True, timeout=0)
print("verifying", flush=True)
sys.stdin.read()
"""


def test_an_opener_behind_a_killed_verifier_verifies(path: Path) -> None:
    """Who waits while another process verifies the file doesn't take its word if that is killed before it is through."""
    with (path / "data.mdb").open("r+b") as file:
        file.seek(2 * 32768)
        file.write(bytes((path / "data.mdb").stat().st_size - 2 * 32768))
    with child_at(VERIFIER, path) as verifier:
        with pytest.raises(StoreBusyError, match="exclusively"):
            Store.open(path, lock_timeout=0.1)
        killer = threading.Timer(0.2, verifier.kill)
        killer.start()
        with pytest.raises(StoreDamagedError, match="repair"):
            Store.open(path, lock_timeout=60.0)
        killer.join()


def test_a_creator_killed_at_birth_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """Whatever of a new store's files a killed creator left, the next opener with a cap makes the store."""
    path = tmp_path / "s"
    with Store.open(path, max_bytes=CAP):
        pass
    empty = (path / "data.mdb").read_bytes()
    run_child(
        "from kvstore.env.pages import write_empty\nwrite_empty(path, page_bytes=32768, map_bytes=1 << 23)", tmp_path / "born"
    )
    unborn = (tmp_path / "born").read_bytes()
    assert unborn != empty
    for left in (
        {"data.mdb.new": unborn[:100]},
        {"data.mdb.new": unborn},
        {"data.mdb": unborn},
        {"data.mdb": unborn, "lock.mdb": b""},
    ):
        for file in path.iterdir():
            file.unlink()
        for name, raw in left.items():
            (path / name).write_bytes(raw)
        with Store.open(path, max_bytes=CAP) as store:
            save(store.namespace(plain_layout()), [1, 2, 3])
            assert_sound(store)
        assert not (path / "data.mdb.new").exists()


GROWS = """
with Store.open(path + "-grows", max_bytes=256 << 20) as store:
    namespace = store.namespace(wide_layout(block_tokens=16))
    print("go", flush=True)
    for n in range(500):
        save(namespace, [n, *range(15)])
"""


def test_a_file_that_grows_is_not_truncated(path: Path) -> None:
    """An opener that looks at the file while another process lets it grow never takes it for one that was cut off."""
    with child_at(GROWS, path) as writer:
        seen = set()
        while writer.poll() is None:
            facts = read_facts(f"{path}-grows/data.mdb")
            assert facts.file_bytes >= (facts.last_page + 1) * facts.page_bytes
            seen.add(facts.file_bytes)
        assert writer.returncode == 0
        assert len(seen) > 30


@pytest.mark.parametrize("written", [0, 3])
def test_several_that_waited_for_a_creator_that_died(tmp_path: Path, written: int) -> None:
    """Where a creator died in its first transaction, who comes in beside another that waited for it waits until one is alone."""
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    write_empty(str(path / "data.mdb"), page_bytes=DEFAULT_PAGE_BYTES, map_bytes=map_bytes_for(CAP, DEFAULT_PAGE_BYTES))
    with (path / "data.mdb").open("ab") as data:  # pages that no meta page tells of
        data.write(bytes(written * DEFAULT_PAGE_BYTES))
    other = os.open(path / "open.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)  # as the other one has it for a moment
        with pytest.raises(StoreBusyError, match="try again"):
            Store.open(path, max_bytes=CAP, lock_timeout=0.05)
    finally:
        os.close(other)
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), [1, 2, 3])
