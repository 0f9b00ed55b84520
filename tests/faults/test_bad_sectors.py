"""Bytes that the disk can't deliver: the sessions they belong to fall back, and the process lives."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout, SessionTier, Store, Stream
from kvstore.records.constants import DEFAULT_PAGE_BYTES
from kvstore.testing import HashEngine, destination, session_rows
from tests.figures import Figures
from tests.support import child, data_file, run_child, wide_layout

TOKENS = list(range(1024))
CAP = 64 << 20


def layout() -> Layout:
    """16 KiB a token, blocks of 1 MiB: sixteen for a session."""
    return wide_layout(16384, 64)


@pytest.fixture
def offsets(tmp_path: Path) -> list[int]:
    """Store a session of sixteen blocks and one that shares nothing with it; give the offsets of the first one's payloads."""
    with Store.open(tmp_path / "store", max_bytes=CAP) as store:
        namespace = store.namespace(layout())
        namespace.save(TOKENS, session_rows(layout(), TOKENS))
        other = [7, *TOKENS[:300]]
        namespace.save(other, session_rows(layout(), other))
        with namespace.lease(TOKENS) as lease:
            return [block.file_offset for block in lease.blocks]


def drop(path: Path) -> None:
    """Drop a store's file from the page cache."""
    with data_file(path).open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path, offsets: list[int]) -> float:
    """Say which share of the pages of some blocks of 1 MiB the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        array = np.frombuffer(view, np.uint8)
        present = np.zeros(-(-array.size // mmap.PAGESIZE), np.uint8)
        assert libc.mincore(array.ctypes.data, array.size, present.ctypes.data) == 0
        del array
    pages = [offset // mmap.PAGESIZE for offset in offsets]
    return float(np.mean([present[page : page + (1 << 20) // mmap.PAGESIZE] & 1 for page in pages]))


def faulty(monkeypatch: pytest.MonkeyPatch, library: Path, **told: str) -> None:
    """Let the children of a test run with the library in front."""
    monkeypatch.setenv("LD_PRELOAD", os.fspath(library))
    for name, value in told.items():
        monkeypatch.setenv(name, value)


RESTORE = """
layout = wide_layout(16384, 64)
TOKENS = list(range(1024))
store = Store.open(path)
namespace = store.namespace(layout)
try:
    restored(namespace, TOKENS)
    print("whole")
except BlockDamaged as error:
    print(error.position, str(error).split(":", 1)[1].split(";")[0].strip())
print(restored(namespace, TOKENS), restored(namespace, [7, *TOKENS[:300]]))
"""


@pytest.mark.parametrize("direct", ["", "open", "read"])
@pytest.mark.parametrize(("block", "inside"), [(0, 700_000), (5, 700_000), (15, (1 << 20) - 1), (5, 0), (5, 12288)])
def test_a_bad_sector_under_one_block(
    tmp_path: Path, offsets: list[int], bad_reads: Path, monkeypatch: pytest.MonkeyPatch, direct: str, block: int, inside: int
) -> None:
    """A sector that can't be read is a named error for its block, past and through the page cache; what lies before it and other
    sessions come back whole, in the same process.
    """
    drop(tmp_path / "store")
    bad = (offsets[block] + inside) // 512 * 512
    told = {"NO_DIRECT": direct} if direct else {}
    # whoever opens the store reads its index, and the system may read on into the first block
    faulty(monkeypatch, bad_reads, BAD_FROM=str(bad), BAD_TO=str(bad + 512), ALL_CACHED="0", **told)
    out = run_child("from kvstore.errors import BlockDamaged" + RESTORE, tmp_path / "store").splitlines()
    assert out == [f"{block * 64} its bytes cannot be read: Input/output error", f"{block * 64} 301"]


def test_a_bad_sector_under_the_index(tmp_path: Path, offsets: list[int], bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of the tree that can't be read is noticed when the store is opened, and refused by name: LMDB would die of it."""
    drop(tmp_path / "store")
    page = DEFAULT_PAGE_BYTES
    raw = data_file(tmp_path / "store").read_bytes()
    code = """
    from kvstore.errors import StoreDamagedError
    try:
        Store.open(path)
    except StoreDamagedError as error:
        print("cannot be verified: [Errno 5]" in str(error))
    """
    refused = set()
    for at in range(2 * page, min(offsets), page):
        if int.from_bytes(raw[at + 10 : at + 12], "little") == 2:
            faulty(monkeypatch, bad_reads, BAD_FROM=str(at), BAD_TO=str(at + 512))
            refused.add(run_child(code, tmp_path / "store"))
    assert "True" in refused  # pages that are free by now aren't looked at


@pytest.mark.parametrize("direct", ["open", "read"])
def test_without_direct_reads(
    tmp_path: Path, offsets: list[int], bad_reads: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """Where a file system refuses direct reads, when opening or when reading, cold bytes come through the page cache, right."""
    drop(tmp_path / "store")
    faulty(monkeypatch, bad_reads, NO_DIRECT=direct)
    out = run_child("from kvstore.errors import BlockDamaged" + RESTORE, tmp_path / "store").splitlines()
    assert out == ["whole", "1024 301"]


def test_a_page_that_was_said_to_be_there(
    tmp_path: Path, offsets: list[int], bad_reads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the page cache is said to have pages that can't be read (the file was cut off), the copy from the map is an error and
    no signal, the next lease is refused, and SIGBUS is the program's own again afterwards.
    """
    end = max(offsets)
    faulty(monkeypatch, bad_reads, ALL_CACHED="1")
    code = """
    import signal
    from kvstore.errors import BlockDamaged, StoreDamagedError
    layout = wide_layout(16384, 64)
    TOKENS = list(range(1024))
    store = Store.open(path)
    lease = store.namespace(layout).lease(TOKENS)
    os.truncate(path + "/data.mdb", int(sys.argv[2]) + 8192)
    before = signal.getsignal(signal.SIGBUS)
    try:
        lease.copy_into(destination(layout, 1024))
        print("whole")
    except BlockDamaged as error:
        print(error.position, str(error).split(":", 1)[1].split(";")[0].strip())
    lease.close()
    try:
        store.namespace(layout).lease(TOKENS)
    except StoreDamagedError as error:
        print("cut off" in str(error))
    assert signal.getsignal(signal.SIGBUS) == before
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGBUS)
    """
    process = child(code, tmp_path / "store", str(end))
    out, err = process.communicate(timeout=300)
    assert process.returncode == -7, err
    assert out.splitlines() == [f"{15 * 64} its bytes cannot be read: the file ends before it", "True"]


def test_promote_falls_back(tmp_path: Path, bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promote over a bad sector resumes on the prefix before it, with the right state, counted; nothing is raised."""
    wide = wide_layout(65536, 16)
    tokens = list(range(100))
    engine = HashEngine(wide, capacity=128)
    engine.feed(tokens)
    with Store.open(tmp_path / "store", max_bytes=CAP) as store, SessionTier(store, engine) as tier:
        tier.cascade(tokens)
    with Store.open(tmp_path / "store") as store, store.namespace(wide).lease(tokens) as lease:
        bad = lease.blocks[4].file_offset + 4096
    drop(tmp_path / "store")
    faulty(monkeypatch, bad_reads, BAD_FROM=str(bad), BAD_TO=str(bad + 512))
    code = """
    wide = wide_layout(65536, 16)
    tokens = list(range(100))
    engine, whole = HashEngine(wide, capacity=128), HashEngine(wide, capacity=128)
    whole.feed(tokens)
    with Store.open(path) as store, SessionTier(store, engine) as tier:
        reused = tier.promote(tokens)
        engine.feed(tokens[reused:])
        print(reused, tier.stats.fallbacks, engine.state_hash() == whole.state_hash())
    """
    assert run_child(code, tmp_path / "store") == "64 1 True"


def test_truncated_while_restores_run(tmp_path: Path, offsets: list[int]) -> None:
    """A file that is cut off while restores run, from the map and from the disk, is an error of some and no signal."""
    code = """
    import threading
    from kvstore.errors import BlockDamaged
    layout = wide_layout(16384, 64)
    TOKENS = list(range(1024))
    store = Store.open(path)
    namespace = store.namespace(layout)
    lease = namespace.lease(TOKENS)
    file = os.open(path + "/data.mdb", os.O_RDWR)
    whole = session_rows(layout, TOKENS)["kv"].tobytes()
    length, outcomes, stopped = os.fstat(file).st_size, set(), False
    saved = os.pread(file, length - 65536, 65536)
    def cut():
        while not stopped:
            os.ftruncate(file, int(sys.argv[2]))
            time.sleep(0.002)
            os.pwrite(file, saved, 65536)
            if len(outcomes) % 2:
                os.fdatasync(file)
            time.sleep(0.004)
    thread = threading.Thread(target=cut)
    thread.start()
    into = destination(layout, 1024)
    until = time.monotonic() + 4
    while time.monotonic() < until or len(outcomes) < 2 and time.monotonic() < until + 20:
        try:
            lease.copy_into(into)
            assert into["kv"].tobytes() == whole
            outcomes.add("whole")
        except BlockDamaged as error:
            outcomes.add("damaged")
    stopped = True
    thread.join()
    print(*sorted(outcomes))
    """
    assert run_child(code, tmp_path / "store", str(min(offsets[8:]))) == "damaged whole"


@pytest.mark.parametrize("by_stream", [False, True])
def test_what_comes_back_twice_gets_into_the_page_cache(tmp_path: Path, by_stream: bool) -> None:
    """The first restore of cold blocks leaves the page cache as it was, the second fills it; both are right, and it is the same
    for one that copies its streams one by one.
    """
    path = tmp_path / "store"
    layout = Layout(streams=tuple(Stream(f"s{i}", "u8", (4096,)) for i in range(4)), block_tokens=64, model="four")
    rows = session_rows(layout, TOKENS)
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        namespace.save(TOKENS, rows)
        with namespace.lease(TOKENS) as lease:
            offsets = [block.file_offset for block in lease.blocks]
    drop(path)
    if cached(data_file(path), offsets) > 0.05:
        pytest.skip("this file system keeps its files in the page cache")
    try:
        os.close(os.open(data_file(path), os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct reads")
    with Store.open(path) as store:
        namespace = store.namespace(layout)
        shares = []
        for _ in range(2):
            into = destination(layout, 1024)
            with namespace.lease(TOKENS) as lease:
                for part in [{name: into[name]} for name in into] if by_stream else [into]:
                    lease.copy_into(part)
            assert all(into[name].tobytes() == rows[name].tobytes() for name in into)
            shares.append(cached(data_file(path), offsets))
    assert shares[0] < 0.2  # the headers' neighbourhood
    assert shares[1] > 0.95


READ_ALL = """
from pathlib import Path
from tests.faults.reading import *
whole, work = Path(path), Path(sys.argv[2])
make(whole)
for place, at in places(whole).items():
    try_all(whole, work, place, at)
"""


def test_every_way_to_read(tmp_path: Path, bad_reads: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures) -> None:
    """Whatever reads a header, rows, a tail or states that can't be read refuses that block by name, falls back before it, or did
    not need that sector; and then the store goes on.
    """
    faulty(monkeypatch, bad_reads, RENEWED="yes")
    outcomes = dict(line.rsplit(": ", 1) for line in run_child(READ_ALL, tmp_path / "whole", tmp_path).splitlines())
    for way in ("copy", "copy of one stream", "transfer", "validate", "map"):
        assert outcomes[f"a header, {way}, past the cache"] == "shorter"
    for place, ways in (("rows", ("copy", "transfer", "validate")), ("states", ("states", "validate"))):
        assert [outcomes[f"{place}, {way}, past the cache"] for way in ways] == ["refused"] * len(ways)
    assert all(outcomes[f"{place}, deep verify, past the cache"] == "refused" for place in ("a header", "rows", "states"))
    ends = ", ".join(f"{end} {count}" for end, count in sorted(Counter(outcomes.values()).items()))
    figures.add("bad sectors", f"{len(outcomes)} reads over one", ends)
