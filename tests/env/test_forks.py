"""A forked child opens the store for itself: both go on, side by side, and nothing of either is damaged by the other's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import PRELUDE, ROOT, assert_restores, assert_sound, plain_layout, run_child

TOKENS = list(range(50))

# What a child is made from: a store that is open, a lease with a view, and what tells whether they are whole.
PARENT = """
import ctypes, gc, threading, warnings
from kvstore.errors import *
warnings.simplefilter("ignore", DeprecationWarning)
layout, tokens, CAP = plain_layout(), list(range(50)), 4 * CAP  # room beside what the lease pins
store = Store.open(path, max_bytes=CAP)
namespace = store.namespace(layout)
save(namespace, tokens)
lease = namespace.lease(tokens)
view = lease.views("v")[0]
whole = session_rows(layout, tokens[:16])["v"].tobytes()

def slots(of):
    "The process ids in LMDB's reader table."
    return [int(line.split()[0]) for line in of._scope.environment._lmdb.readers().splitlines()[1:] if line.strip()]

def work(more):
    "What a child does: open, restore, save, evict, lease, close, open again."
    with Store.open(path) as own:
        there = own.namespace(layout)
        assert_restores(there, tokens, 50)
        save(there, tokens + list(range(1000, 1000 + more)))
        with there.lease(tokens) as held:
            assert sorted(set(slots(own))) == sorted({os.getpid(), *parents()}), slots(own)
            assert held.views("v")[0].tobytes() == whole
        there.evict(tokens + list(range(1000, 1000 + more)))
    with Store.open(path, max_bytes=CAP) as own:
        assert restored(own.namespace(layout), tokens) <= 50
        save(own.namespace(layout), tokens)
        assert own._scope.environment.readers.clear() == 0
        assert_sound(own)

def parents():
    return [PARENT]

PARENT = os.getpid()

def fork(child):
    pid = os.fork()
    if not pid:
        try:
            child()
        except BaseException as error:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def await_child(pid, status=0):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status, pid

def go_on():
    "The parent has lost nothing: its reader slot, its pages, its locks."
    assert slots(store).count(PARENT) >= 1, slots(store)
    assert view.tobytes() == whole
    save(namespace, tokens)
    assert_restores(namespace, tokens, 50)
    assert_sound(store)
"""


def run(code: str, path: Path) -> None:
    """Run a parent's code to its end, and look at the store afterwards."""
    assert run_child(PARENT + code + '\nprint("whole")', path).splitlines()[-1] == "whole"
    with Store.open(path) as store:
        assert_restores(store.namespace(plain_layout()), TOKENS, 50)
        assert_sound(store)
    with Store.open(path) as store:  # nobody holds it any more
        assert store._scope.environment.exclusive(0.0)


ENDS = {
    "_exit": "os._exit(7)",
    "exit": "sys.exit(7)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "collected": "del view, lease, namespace; store.close(); del store; gc.collect(); os._exit(7)",
}


@pytest.mark.parametrize("end", sorted(ENDS))
def test_a_child_opens_its_own(tmp_path: Path, end: str) -> None:
    """A child opens the store, restores, saves, closes, opens again, and ends in whatever way; the parent's lease goes on."""
    code = f"""
for turn in range(2):
    pid = os.fork()
    if not pid:
        work(20)
        own = Store.open(path)
        held = own.namespace(layout).lease(tokens)
        {ENDS[end]}
        os._exit(1)
    await_child(pid, {-9 if end == "killed" else 7})
    go_on()
assert store._scope.environment.readers.clear() in (0, 1)
assert set(slots(store)) == {{PARENT}}
"""
    run(code, tmp_path / "s")


def test_both_at_once(tmp_path: Path) -> None:
    """Parent and children save, restore and evict at the same time, each under leases of its own."""
    code = """
def busy():
    with Store.open(path) as own:
        there = own.namespace(layout)
        for n in range(15):
            mine = [os.getpid(), *range(n, 60 + n)]
            save(there, mine)
            assert_restores(there, mine, 61)
            there.evict(mine)
pids = [fork(busy) for _ in range(3)]
for n in range(15):
    save(namespace, [7, *range(n, 70)])
    assert_restores(namespace, [7, *range(n, 70)], 71 - n)
for pid in pids:
    await_child(pid)
go_on()
"""
    run(code, tmp_path / "s")


def test_a_child_of_a_child(tmp_path: Path) -> None:
    """A child that has the store open forks again: its child opens it too, while both of them and the parent hold leases."""
    code = """
def child():
    global parents
    with Store.open(path) as own:
        there = own.namespace(layout)
        with there.lease(tokens) as held:
            mine = os.getpid()
            parents = lambda: [PARENT, mine]
            await_child(fork(lambda: work(30)))
            assert mine in slots(own)
            assert held.views("v")[0].tobytes() == whole
            for old in (lambda: store.stats(), lambda: namespace.match(tokens), lambda: lease.validate()):
                try:
                    old()
                    raise AssertionError
                except ForkedStoreError:
                    pass
        save(there, tokens + [5])
        assert_sound(own)
await_child(fork(child))
go_on()
"""
    run(code, tmp_path / "s")


@pytest.mark.parametrize("killed", [False, True])
def test_the_parent_goes_first(tmp_path: Path, killed: bool) -> None:
    """When the parent ends before its child, the child goes on, with its own handle and with one that it opens later."""
    code = """
read, write = os.pipe()
def child():
    parent = os.getppid()
    with Store.open(path) as own:
        there = own.namespace(layout)
        held = there.lease(tokens)
        os.write(write, b"x")
        while os.getppid() == parent:
            time.sleep(0.005)
        own._scope.environment.readers.clear()
        assert set(slots(own)) == {os.getpid()}
        assert held.views("v")[0].tobytes() == whole
        save(there, tokens + [9])
        assert_sound(own)
        held.close()
    with Store.open(path) as own:
        assert own._scope.environment.exclusive(5.0)
    print("child whole", flush=True)
fork(child)
os.read(read, 1)
"""
    end = "os.kill(os.getpid(), signal.SIGKILL)" if killed else "sys.exit(0)"
    outer = """
import subprocess
source = sys.argv[2]
done = subprocess.run([sys.executable, "-c", source, path], stdout=subprocess.PIPE, text=True)  # its end is that of the last writer
print(done.stdout)
"""
    printed = run_child(outer, tmp_path / "s", PRELUDE + PARENT + code + end)
    assert "child whole" in printed
    with Store.open(tmp_path / "s") as store:
        assert_restores(store.namespace(plain_layout()), [*TOKENS, 9], 51)
        assert_sound(store)


def test_a_fork_while_threads_work(tmp_path: Path) -> None:
    """Forks at any instant of threads that open, save, lease and close: each child opens the store, no lock is stuck or lost."""
    code = """
over = False
del view
lease.close()  # it would pin what is freed meanwhile
def saves():
    n = 0
    while not over:
        n += 1
        save(namespace, [3, n % 40, *range(200)])
def leases():
    while not over:
        with namespace.lease(tokens) as held:
            held.views("v"), held.validate()
def opens():
    n = 0
    while not over:
        n += 1
        with Store.open(f"{path}-{n % 3}", max_bytes=CAP) as other:
            save(other.namespace(layout), [n, 1, 2])
threads = [threading.Thread(target=act, daemon=True) for act in (saves, leases, opens)]
for thread in threads:
    thread.start()
def child():
    signal.alarm(60)
    with Store.open(path, lock_timeout=30.0) as own:
        there = own.namespace(layout)
        assert_restores(there, tokens, 50)
        save(there, [os.getpid(), 1, 2])
        there.evict([os.getpid(), 1, 2])
    for n in range(3):
        try:
            with Store.open(f"{path}-{n}", max_bytes=CAP, lock_timeout=30.0) as other:
                assert other.namespace(layout).match([1 << 20]) is None
        except ForkedStoreError:
            print("refused", flush=True)
for _ in range(25):
    await_child(fork(child))
over = True
for thread in threads:
    thread.join()
lease = namespace.lease(tokens)
view = lease.views("v")[0]
go_on()
for n in range(3):  # no child has kept a lock
    with Store.open(f"{path}-{n}") as other:
        assert other._scope.environment.exclusive(0.0)
"""
    run(code, tmp_path / "s")


def test_a_fork_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """A child forked by the thread that holds the write lock neither commits nor unlocks; it writes once the parent is done."""
    code = """
pid = -1
try:
    with store._scope.environment.write(5.0) as txn:
        txn.put(txn.db.meta, b"half", b"parent")
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                with Store.open(path, lock_timeout=0.1):
                    raise AssertionError("opened behind a writer")
            except StoreBusyError:
                pass
            os.write(write, b"x")
        else:
            os.read(read, 1)
            try:
                run_child("Store.open(path, lock_timeout=0.1)", path)
                raise SystemError
            except AssertionError as error:
                assert "StoreBusyError" in str(error)
except ForkedStoreError:
    assert not pid
    os._exit(7)
assert pid > 0
await_child(pid, 7)
with store._scope.environment.reading() as txn:
    assert txn.get(b"half", txn.db.meta) == b"parent"
with store._scope.environment.write(5.0) as txn:
    txn.delete(txn.db.meta, b"half")
await_child(fork(lambda: work(20)))
go_on()
"""
    run(code, tmp_path / "s")


def test_a_second_open_by_lmdb_itself_is_refused(tmp_path: Path) -> None:
    """In a child too LMDB opens a file once: who opens it past kvstore is refused, before and after kvstore has opened it."""
    code = """
import lmdb
def child():
    for _ in range(2):
        for _ in range(2):
            try:
                lmdb.open(path, create=False)
                raise AssertionError
            except lmdb.Error as error:
                assert "already open" in str(error)
        with Store.open(path) as own:
            try:
                lmdb.open(path, create=False)
                raise AssertionError
            except lmdb.Error as error:
                assert "already open" in str(error)
            with Store.open(path) as again:
                assert again._scope is own._scope
await_child(fork(child))
go_on()
"""
    run(code, tmp_path / "s")


def test_another_py_lmdb_is_a_named_refusal(tmp_path: Path) -> None:
    """Where py-lmdb tells files apart in another way, the child is refused by name with what to do instead."""
    code = """
from kvstore.env import forks
def child():
    forks._plain = None  # as where the function isn't there
    try:
        Store.open(path)
        raise AssertionError
    except ForkedStoreError as error:
        assert "spawn" in str(error) and "py-lmdb" in str(error)
    with Store.open(path + "-other", max_bytes=CAP) as other:
        save(other.namespace(layout), tokens)
await_child(fork(child))
go_on()
"""
    run(code, tmp_path / "s")


def test_a_resized_store_in_a_child(tmp_path: Path) -> None:
    """A store whose data file was replaced since the fork, while lock.mdb is the same, opens in the child."""
    code = """
del view
lease.close()
read, write = os.pipe()
def child():
    os.read(read, 1)
    with Store.open(path) as own:
        assert own.max_bytes == CAP // 2
        assert_restores(own.namespace(layout), tokens, 50)
        save(own.namespace(layout), tokens + [1])
        assert_sound(own)
pid = fork(child)
store.resize(CAP // 2)
os.write(write, b"x")
await_child(pid)
assert_restores(store.namespace(layout), tokens + [1], 51)
"""
    assert run_child(PARENT + code + '\nprint("whole")', tmp_path / "s") == "whole"


WORKERS = """
import asyncio, concurrent.futures, multiprocessing
from kvstore import Store
from tests.support import *

def worker(path, first):
    "Save and restore a session of its own, and restore the parent's."
    with Store.open(path) as own:
        namespace = own.namespace(plain_layout())
        assert_restores(namespace, list(range(50)), 50)
        save(namespace, [first, *range(60)])
        assert_restores(namespace, [first, *range(60)], 61)
        return os.getpid()
"""
MAIN = """
if __name__ == "__main__":
    path, kind = sys.argv[1:]
    store = Store.open(path, max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    save(namespace, list(range(50)))
    with namespace.lease(list(range(50))) as lease:
        if kind == "asyncio":
            async def main():
                await asyncio.gather(*(asyncio.to_thread(worker, path, first) for first in range(100, 104)))
            asyncio.run(main())
        elif kind == "threads":
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(worker, [path] * 4, range(100, 104)))
        elif kind.startswith("pool-"):
            context = multiprocessing.get_context(kind[5:])
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                assert os.getpid() not in set(pool.map(worker, [path] * 4, range(100, 104)))
        else:
            context = multiprocessing.get_context(kind)
            workers = [context.Process(target=worker, args=(path, first)) for first in range(100, 104)]
            for process in workers:
                process.start()
            for process in workers:
                process.join()
                assert process.exitcode == 0
        lease.validate()
    for first in range(100, 104):
        assert_restores(namespace, [first, *range(60)], 61)
    assert_sound(store)
    print("whole")
"""


@pytest.mark.parametrize("kind", ["fork", "spawn", "forkserver", "pool-fork", "pool-spawn", "threads", "asyncio"])
def test_workers_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Workers that a server starts while it has the store open save and restore: processes of each kind, threads, asyncio."""
    script = tmp_path / "workers.py"
    script.write_text("import os, sys\n" + WORKERS + MAIN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "s"), kind], capture_output=True, text=True, check=False, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole"
