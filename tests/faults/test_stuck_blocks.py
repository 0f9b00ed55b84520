"""A bad sector under the first page of a block's value, which LMDB reads through its map before it frees the block."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.records.block import header_bytes
from kvstore.records.constants import PAGE_HEADER
from kvstore.testing import session_rows
from tests.support import data_file, flip, run_child, wide_layout

from .test_bad_sectors import CAP, drop, faulty

TOKENS = list(range(512))
OTHER = [7, *TOKENS[:300]]


@pytest.fixture
def first_page(tmp_path: Path) -> int:
    """Store two sessions; give the offset of the first page of the first one's third block."""
    layout = wide_layout(16384, 64)
    with Store.open(tmp_path / "store", max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        for tokens in (TOKENS, OTHER):
            namespace.save(tokens, session_rows(layout, tokens))
        with namespace.lease(TOKENS) as lease:
            page = lease.blocks[2].file_offset - header_bytes(1) - PAGE_HEADER
    drop(tmp_path / "store")
    return page


GOES_BAD = """
from kvstore.errors import BlockDamaged, StoreDamagedError
def go_bad():
    os.environ["BAD_FROM"], os.environ["BAD_TO"] = sys.argv[2], str(int(sys.argv[2]) + 512)
"""

HEAL = """
layout = wide_layout(16384, 64)
TOKENS = list(range(512))
OTHER = [7, *TOKENS[:300]]
store = Store.open(path)
namespace = store.namespace(layout)
go_bad()
print(restored_at_last(namespace, TOKENS))
try:
    save(namespace, TOKENS)
    print("healed", restored(namespace, TOKENS))
except BlockDamaged as error:
    print("repair" in str(error), restored(namespace, TOKENS))
before = store.stats()
namespace.evict(TOKENS)
after = store.stats()
print(before.blocks - after.blocks, after.bad_blocks, after.counters.stuck_blocks, restored(namespace, OTHER))
"""


def test_a_sector_that_takes_a_write(tmp_path: Path, first_page: int, bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is healed by its next save and its blocks are freed by an eviction, as with any damage."""
    faulty(monkeypatch, bad_reads, RENEWED="yes")
    out = run_child(GOES_BAD + HEAL + "print(store.verify(deep=True).ok)", tmp_path / "store", str(first_page)).splitlines()
    assert out == ["128", "healed 512", "8 0 0 301", "True"]


EVICT = """
layout = wide_layout(16384, 64)
store = Store.open(path)
namespace = store.namespace(layout)
go_bad()
namespace.evict(list(range(512)))
print(store.verify(deep=True).ok, store.stats().blocks, store.stats().counters.stuck_blocks)
"""


def test_evicted_at_once(tmp_path: Path, first_page: int, bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that nobody has read since its sector went bad is freed as well."""
    faulty(monkeypatch, bad_reads, RENEWED="yes")
    assert run_child(GOES_BAD + EVICT, tmp_path / "store", str(first_page)) == "True 5 0"


def test_a_sector_that_stays_bad(tmp_path: Path, first_page: int, bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block can't be healed or freed: both are said, it is left and not tried again, and everything else goes on."""
    faulty(monkeypatch, bad_reads, RENEWED="no")
    more = """
    from kvstore.radix import sweep
    print(*[problem.what for problem in store.verify(deep=True).problems])
    with store._scope.environment.write(10.0) as txn:  # as damage elsewhere would make it
        print(sweep(txn), txn.stuck)
    print(len(store.verify(deep=True).problems), store.stats().bad_blocks)
    for number in range(12):  # more than the store holds
        save(namespace, [number, 9, *TOKENS])
    print(restored(namespace, [11, 9, *TOKENS]), store.stats().counters.stuck_blocks)
    try:
        save(namespace, TOKENS)
    except BlockDamaged as error:
        print("repair" in str(error), restored(namespace, TOKENS))
    """
    code = GOES_BAD + HEAL + textwrap.dedent(more)
    out = run_child(code, tmp_path / "store", str(first_page)).splitlines()
    assert out[:3] == ["128", "True 128", "7 1 1 301"]
    assert out[3] == "it is of no use any more and can't be freed: 33 pages are taken until a repair"
    assert out[4:6] == ["Swept(records=0, counts=0) []", "1 1"]
    assert out[6] == "514 1"
    assert out[7].startswith("True ")


def test_a_wrong_number_of_pages(tmp_path: Path, first_page: int) -> None:
    """A value that says it has other pages than were recorded isn't freed: LMDB would free those of others with it."""
    with Store.open(tmp_path / "store") as store:
        namespace = store.namespace(wide_layout(16384, 64))
        flip(data_file(tmp_path / "store"), first_page + 12, 0x01)
        namespace.evict(TOKENS)
        assert store.stats().counters.stuck_blocks == 1
        assert store.stats().blocks == 6
        [problem] = store.verify(deep=True).problems
        assert "can't be freed" in problem.what


COMPACT = """
from kvstore.env import compact, exclusive_environment
with exclusive_environment(path, lock_timeout=10) as environment:
    go_bad()
    try:
        compact(environment, int(sys.argv[3]))
    except StoreDamagedError as error:
        print("cannot be read at" in str(error), "repair" in str(error))
del os.environ["BAD_FROM"]
store = Store.open(path)
print(store.max_bytes, restored(store.namespace(wide_layout(16384, 64)), list(range(512))))
"""


def test_lowering_the_cap(tmp_path: Path, first_page: int, bad_reads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction, which reads everything through LMDB's map, is refused by name where something can't be read."""
    faulty(monkeypatch, bad_reads)
    out = run_child(GOES_BAD + COMPACT, tmp_path / "store", str(first_page), str(CAP // 2)).splitlines()
    assert out == ["True True", f"{CAP} 512"]
