"""A file that ends before its last page, which LMDB never wrote: nothing was cut off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import StoreDamagedError
from tests.support import CAP, assert_restores, assert_sound, child_at, data_file, plain_layout, save

TOKENS = list(range(50))
PAGES = 20  # which a transaction takes at the end of the file and gives back


def shorten(store: Store) -> tuple[int, int]:
    """Leave free pages at the end that were never written; returns the file's size and where its last page ends."""
    environment = store._scope.environment
    with environment.write(5.0) as txn:
        free = environment.end_bytes() // environment.page_bytes - txn.live_pages()
        txn.put(txn.db.blocks, b"passing", bytes((free + PAGES) * environment.page_bytes))
        txn.delete(txn.db.blocks, b"passing")
    return os.stat(f"{store.path}/data.mdb").st_size, environment.end_bytes()


def test_pages_that_were_never_written(tmp_path: Path) -> None:
    """Such a store opens, alone and beside a process that has it open, and grows again; with a page less it is refused."""
    path = tmp_path / "s"
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        size, end = shorten(store)
        assert size <= end - PAGES * 32768
        with child_at("store = Store.open(path)\nprint('go', flush=True)", path) as other:
            assert other.wait(60) == 0
    for _ in range(2):
        with Store.open(path) as store:
            assert_restores(store.namespace(plain_layout()), TOKENS, 50)
            assert_sound(store)
    with Store.open(path) as store:
        for first in range(60):
            save(store.namespace(plain_layout(block_tokens=64)), [first, *range(600)])
        assert os.stat(data_file(path)).st_size > size
        assert_sound(store)
    os.truncate(data_file(path), 8 * 32768)
    with pytest.raises(StoreDamagedError, match="truncated"):
        Store.open(path)
