"""Repair of a store on a disk with bad sectors: what can't be read is lost, and everything else is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.env.damaged import DamagedFile, PageReader, free_pages, read_metas
from kvstore.records.constants import DEFAULT_PAGE_BYTES
from tests.support import CAP, assert_restores, data_file, plain_layout, run_child, save

SESSIONS = [[n, *range(60)] for n in range(5)]

REPAIR = """
done = Store.repair(path)
print(done.rewritten, done.sessions_kept, done.sessions_lost)
"""


def live_page(data: Path, record: bytes) -> int:
    """The page in which a record stands; older copies of it are free by now."""
    file = DamagedFile(os.fspath(data))
    try:
        meta = read_metas(file)[0]
        free = free_pages(PageReader(file, meta.page_bytes, meta.last_page), meta.free)
        assert free is not None
        live = [n for n in range(meta.last_page + 1) if n not in free]
        return next(n for n in live if record in file.read(n * meta.page_bytes, meta.page_bytes))
    finally:
        file.close()


@pytest.mark.parametrize("where", ["meta", "children", "payload"])
def test_sectors_that_cannot_be_read(tmp_path: Path, bad_reads: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A bad sector in a meta page or in an index page is repaired into a new file, one in a payload in place."""
    path = tmp_path / "s"
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        for tokens in SESSIONS:
            save(namespace, tokens)
        with namespace.lease(SESSIONS[2]) as lease:
            payload = lease.blocks[1].file_offset
        environment = namespace.scope.store.environment
        with environment.reading() as txn:
            key, raw = next(txn.items(txn.db.children))
    index = live_page(data_file(path), key + raw) * DEFAULT_PAGE_BYTES
    at = {"meta": DEFAULT_PAGE_BYTES, "children": index, "payload": payload}[where]
    with monkeypatch.context() as shim:
        shim.setenv("LD_PRELOAD", os.fspath(bad_reads))
        shim.setenv("BAD_UNDER", os.fspath(path))  # the new file lies elsewhere on the disk
        shim.setenv("BAD_FROM", str(at))
        shim.setenv("BAD_TO", str(at + 512))
        out = run_child(REPAIR, path)
    if where == "payload":
        assert out == "False 4 1"
    else:
        assert out == "True 5 0"
    with Store.open(path) as store:
        assert store.verify(deep=True).ok
        for n, tokens in enumerate(SESSIONS):
            assert_restores(store.namespace(plain_layout()), tokens, 16 if where == "payload" and n == 2 else 61)
