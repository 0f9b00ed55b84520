"""A damaged file: refused by name when it is opened, or met later and named then. Never other bytes, never a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import NotAStoreError, StoreDamagedError, StoreMissingError
from tests.support import (
    CAP,
    data_file,
    flip,
    hybrid_layout,
    plain_layout,
    restored_at_last,
    run_child,
    save,
)

PAGE = 32768


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of a few sessions, closed: tests copy it."""
    path = tmp_path_factory.mktemp("damage") / "s"
    with Store.open(path, max_bytes=CAP) as store:
        for layout in (plain_layout(), hybrid_layout()):
            namespace = store.namespace(layout)
            for first in range(6):
                save(namespace, [first % 3, *range(10 + 13 * first)])
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Copy the store."""
    return Path(shutil.copytree(whole, tmp_path / "s"))


@pytest.mark.parametrize("keep", [1, 100, 4096, PAGE, 2 * PAGE, 2 * PAGE + 1, -PAGE, -1])
def test_a_truncated_file_is_refused(copy: Path, keep: int) -> None:
    """A data file cut anywhere is refused by name with what to do, and isn't touched."""
    size = data_file(copy).stat().st_size
    os.truncate(data_file(copy), keep if keep > 0 else size + keep)
    before = data_file(copy).read_bytes()
    for cap in (None, CAP):
        with pytest.raises(StoreDamagedError, match="move it away") as caught:
            Store.open(copy, max_bytes=cap)
    assert isinstance(caught.value, OSError)
    assert data_file(copy).read_bytes() == before


def test_an_empty_file_is_refused(copy: Path) -> None:
    """A data file of no bytes is a truncated store and isn't taken for a new one."""
    os.truncate(data_file(copy), 0)
    for cap in (None, CAP):
        with pytest.raises(StoreDamagedError, match="empty"):
            Store.open(copy, max_bytes=cap)
    assert data_file(copy).stat().st_size == 0


def test_a_lost_data_file_is_a_new_store(copy: Path) -> None:
    """A directory with lock files and no data file needs a cap again, and then is a new, empty store."""
    data_file(copy).unlink()
    with pytest.raises(StoreMissingError):
        Store.open(copy)
    with Store.open(copy, max_bytes=CAP) as store:
        assert store.stats().nodes == 0


def test_a_hole_in_the_middle_is_refused_or_found(copy: Path) -> None:
    """A page of zeros where the index was is refused by name."""
    with data_file(copy).open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(bytes(data_file(copy).stat().st_size - 2 * PAGE))
    with pytest.raises(StoreDamagedError):
        Store.open(copy)


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("offset", [16, 20, 32, 40, 44, 88, 136, 144])
def test_a_flipped_byte_in_a_meta_page(copy: Path, page: int, offset: int) -> None:
    """A changed byte in a meta page is refused by name, or what it says is not used and every session is still whole."""
    flip(data_file(copy), page * PAGE + offset)
    try:
        store = Store.open(copy)
    except (StoreDamagedError, NotAStoreError):
        return
    with store:
        assert_whole_or_shorter(store)


FLAGS = """
from kvstore.errors import StoreDamagedError
try:
    with Store.open(path) as store:
        save(store.namespace(plain_layout()), [9, *range(60)])
        store.namespace(plain_layout()).evict()
        print("saved")
except StoreDamagedError as error:
    print("meta pages" in str(error.__cause__))
"""


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("offset", [44, 92], ids=["free list", "main tree"])
def test_flags_that_make_lmdb_abort(copy: Path, page: int, offset: int) -> None:
    """A bit that says that keys have several values, for which LMDB ends the process at the next write, is refused."""
    flip(data_file(copy), page * PAGE + offset, 0x04)
    assert run_child(FLAGS, copy) == "True"
    assert Store.repair(copy).tokens_lost == 0


def test_both_meta_pages_gone(copy: Path) -> None:
    """Without a meta page that parses, the store is damaged: not foreign, since our lock files lie beside it; not new."""
    for page in (0, 1):
        for offset in range(16, 24):
            flip(data_file(copy), page * PAGE + offset)
    with pytest.raises(StoreDamagedError):
        Store.open(copy, max_bytes=CAP)


def assert_whole_or_shorter(store: Store) -> None:
    """Restore every session: the longest prefix that is offered has to be right, byte for byte."""
    for layout in (plain_layout(), hybrid_layout()):
        namespace = store.namespace(layout)
        for first in range(6):
            restored_at_last(namespace, [first % 3, *range(10 + 13 * first)])
