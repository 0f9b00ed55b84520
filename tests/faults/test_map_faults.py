"""Pages of LMDB's own map that can't be read while a store is open: misses and named errors, and the process lives.

A file that is cut off is the same fault for who touches its map as a sector that can't be read.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import StoreDamagedError
from kvstore.records.constants import DEFAULT_PAGE_BYTES
from tests.support import CAP, child, examples, plain_layout, run_child, save

from .hammer import fill

PROMPTS = [[number, *range(400)] for number in range(8)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a few sessions."""
    with Store.open(tmp_path / "store", max_bytes=CAP) as store:
        for tokens in PROMPTS:
            save(store.namespace(plain_layout()), tokens)
    return tmp_path / "store"


def test_whatever_is_done_meanwhile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Matching, restoring, saving, promoting, cascading, evicting, verifying, opening, while the file is cut off, at any instant in
    which nobody commits: right bytes, a miss or a named error.
    """
    rounds = examples(20)
    fill(tmp_path / "filled")
    seed = random.randrange(1 << 30)
    code = """
    import runpy
    sys.argv = ["hammer", *sys.argv[1:]]
    runpy.run_module("tests.faults.hammer", run_name="__main__")
    """
    lines = run_child(code, tmp_path / "filled", str(seed), str(rounds)).splitlines()
    counts = {outcome: int(count) for count, outcome in (line.split(" ", 1) for line in lines)}
    with capsys.disabled():
        done = sum(count for outcome, count in counts.items() if outcome.endswith("done"))
        refused = sum(counts.values()) - done
        print(f"\n{rounds} files cut off, seed {seed}, {done} calls done, {refused} refused by name, 0 processes died")
    assert not [outcome for outcome in counts if "unnamed" in outcome]
    assert counts["tier done"]
    assert counts["save StoreDamagedError"]


REFUSED = """
from kvstore.errors import KVStoreError, StoreDamagedError
store = Store.open(path)
namespace = store.namespace(plain_layout())
prompts = [[number, *range(400)] for number in range(8)]
os.truncate(path + "/data.mdb", int(sys.argv[2]))
def said(what):
    try:
        return what()
    except KVStoreError as error:
        return type(error).__name__
def refused(what):
    try:
        what()
    except StoreDamagedError as error:
        return "reading and writing are refused" in str(error) and "python -m kvstore repair" in str(error)
print(*[said(lambda: namespace.match(tokens)) for tokens in prompts])
print(*[said(lambda: restored(namespace, tokens)) for tokens in prompts])
print(*[refused(lambda: save(namespace, [99, *tokens])) for tokens in prompts])
print(refused(lambda: store._scope.environment.settle()))
store.close()
print(signal.getsignal(signal.SIGBUS) == signal.SIG_DFL)
print(said(lambda: Store.open(path)))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.parametrize(
    "length", [0, 100, 4096, *(pages * DEFAULT_PAGE_BYTES for pages in (1, 3, 40)), 40 * DEFAULT_PAGE_BYTES + 100]
)
def test_cut_off(path: Path, length: int) -> None:
    """Wherever the file is cut off, nothing is read or written any more, by name, and after the close SIGBUS is the program's own
    again.
    """
    process = child(REFUSED, path, str(length))
    out, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGBUS, err
    matches, restores, saves, settled, handler, opened = out.splitlines()
    assert set(matches.split()) == set(restores.split()) == {"StoreDamagedError"}
    assert set(saves.split()) == {"True"}
    assert settled == handler == "True"
    assert opened in {"StoreDamagedError", "NotAStoreError", "StoreMissingError"}


def test_growing_is_no_fault(path: Path) -> None:
    """A file that grows, whoever makes it, also behind a hole where it ended before (as sparse copies have), is as good as ever."""
    with Store.open(path) as store:
        faults = store._scope.environment._faults
        size = (path / "data.mdb").stat().st_size
        for grown in (size + 1, size + (4 << 20)):
            os.truncate(path / "data.mdb", grown)
            faults.check_length()
        assert not faults.met
        save(store.namespace(plain_layout()), [99, *range(400)])
        os.truncate(path / "data.mdb", size)
        with pytest.raises(StoreDamagedError, match="cut off"):
            faults.check_length()


@pytest.mark.parametrize("beside", ["nothing", "a copy", "a file of the program's"])
def test_nothing_of_a_lost_page_is_committed(path: Path, beside: str) -> None:
    """A transaction that is under way when a page is lost is refused at its end; and where LMDB is in its commit already, its
    descriptor can't write any more: also in a child whose parent has the store open, or where the program has opened the file.
    """
    code = """
    import ctypes, lmdb
    from kvstore.env.faults import _find_map
    from kvstore.errors import StoreDamagedError
    if sys.argv[2] == "a copy":
        parents = Store.open(path)
        if pid := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    elif sys.argv[2] != "nothing":
        other = open(path + "/data.mdb", "r+b")
    store = Store.open(path)
    environment = store._scope.environment
    raw = open(path + "/data.mdb", "rb").read()
    address, length = _find_map(environment._lmdb, environment.db)
    late = environment._lmdb.begin(write=True)  # behind the environment's back, as if it were past its last look
    late.put(b"key", b"value", db=environment.db.meta)
    assert len(raw) < length
    print(ctypes.string_at(address + length - 32768, 12)[10:], environment._faults.lost)  # behind the file's end
    try:
        late.commit()
    except lmdb.Error as error:
        print(error)
    print(open(path + "/data.mdb", "rb").read() == raw)
    try:
        with environment.write(10.0):
            pass
    except StoreDamagedError as error:
        print(str(error).startswith("1 pages of the index"))
    print(restored(store.namespace(plain_layout()), [3, *range(400)]))
    """
    lost, commit, same, refused, restores = run_child(code, path, beside).splitlines()
    assert (lost, same, refused, restores) == (r"b'\x03\x00' 1", "True", "True", "401")
    assert "Bad file descriptor" in commit


def test_lost_inside_a_transaction(path: Path) -> None:
    """A page that is lost in the middle of a transaction makes it an error, whatever the transaction makes of it."""
    code = """
    from kvstore.errors import StoreDamagedError
    store = Store.open(path)
    environment = store._scope.environment
    end = os.path.getsize(path + "/data.mdb")
    try:
        with environment.write(10.0) as txn:
            os.truncate(path + "/data.mdb", 8 * 32768)
            try:
                list(txn.items(txn.db.nodes))
            except StoreDamagedError:
                pass
    except StoreDamagedError as error:
        print("writing are refused" in str(error), os.path.getsize(path + "/data.mdb"))
    """
    assert run_child(code, path) == f"True {8 * DEFAULT_PAGE_BYTES}"


OTHERS = """
import faulthandler, mmap, tempfile
if "before" in sys.argv:
    faulthandler.enable()
store = Store.open(path)
if "after" in sys.argv:
    faulthandler.enable()
file = tempfile.TemporaryFile()
file.truncate(4096)
foreign = mmap.mmap(file.fileno(), 4096)
file.truncate(0)
if "ours" in sys.argv:
    try:
        with store._scope.environment.reading() as txn:
            os.truncate(path + "/data.mdb", 8 * 32768)
            list(txn.items(txn.db.nodes))
    except KVStoreError as error:
        print(type(error).__name__, flush=True)
if "foreign" in sys.argv:
    foreign[0]
"""


@pytest.mark.parametrize("when", ["before", "never"])
def test_faults_of_others(path: Path, when: str) -> None:
    """A fault outside of LMDB's map ends the process as ever, and Python's faulthandler, enabled before, says where; one inside
    it is nobody's business.
    """
    process = child("from kvstore.errors import KVStoreError" + OTHERS, path, when, "ours", "foreign")
    out, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGBUS
    assert out == "StoreDamagedError\n"
    assert ("Fatal Python error: Bus error" in err) == (when == "before")


def test_a_handler_that_comes_later(path: Path) -> None:
    """Who installs a handler over kvstore's has it: faulthandler, enabled while a store is open, reports and ends the process."""
    process = child("from kvstore.errors import KVStoreError" + OTHERS, path, "after", "ours")
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in err


def test_a_thread_that_blocks_the_signal(path: Path) -> None:
    """A thread that has all signals blocked, as worker threads often have, is helped as well."""
    code = """
    import threading
    from kvstore.errors import StoreDamagedError
    store = Store.open(path)
    environment = store._scope.environment
    def work():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with environment.reading() as txn:
                os.truncate(path + "/data.mdb", 8 * 32768)
                list(txn.items(txn.db.nodes))
        except StoreDamagedError:
            print("refused", environment._faults.lost > 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    """
    assert run_child(code, path) == "refused True"


def test_a_map_that_was_enlarged(path: Path) -> None:
    """Raising the cap maps the file anew, somewhere else: that map is watched as well."""
    code = """
    from kvstore.env import exclusive_environment
    from kvstore.errors import StoreDamagedError
    with exclusive_environment(path, lock_timeout=10) as environment:
        environment.set_map_bytes(environment.map_bytes * 2)
        try:
            with environment.reading() as txn:
                os.truncate(path + "/data.mdb", 8 * 32768)
                print(len(list(txn.items(txn.db.nodes))))
        except StoreDamagedError:
            print("refused", environment._faults.lost > 0)
    """
    assert run_child(code, path) == "refused True"


def test_a_forked_child(path: Path) -> None:
    """A child has the program's handler, and its own stores are watched."""
    code = """
    import shutil
    from kvstore.errors import StoreDamagedError
    shutil.copytree(path, path + ".2")
    store = Store.open(path)
    pid = os.fork()
    if not pid:
        own = Store.open(path + ".2")
        try:
            with own._scope.environment.reading() as txn:
                os.truncate(path + ".2/data.mdb", 8 * 32768)
                list(txn.items(txn.db.nodes))
        except StoreDamagedError:
            own.close()
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGBUS)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(restored(store.namespace(plain_layout()), [3, *range(400)]))
    """
    assert run_child(code, path).splitlines() == [str(-signal.SIGBUS), "401"]


def test_more_stores_than_can_be_watched(tmp_path: Path) -> None:
    """The 65th store that a process has open works as ever, says once that it isn't watched, and gives way to the next."""
    code = """
    import logging, shutil
    from pathlib import Path
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    Store.open(path + ".0", max_bytes=8 << 20).close()
    for number in range(1, 67):
        shutil.copytree(path + ".0", f"{path}.{number}")
    stores = [Store.open(f"{path}.{number}") for number in range(65)]
    print(save(stores[64].namespace(plain_layout()), [1, 2, 3]).tokens)
    stores[0].close()
    stores.append(Store.open(path + ".65"))
    """
    warned, saved = run_child(code, tmp_path / "s").splitlines()
    assert "64 stores are open in this process" in warned
    assert saved == "3"
