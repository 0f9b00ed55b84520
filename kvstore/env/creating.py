"""Making a new store's file: its databases, its identity, and a region in which only index pages find room."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import lmdb

from kvstore.env.transactions import Databases, translated
from kvstore.errors import StoreMissingError
from kvstore.records.constants import DATABASES, PAGE_HEADER, SPACER_REGION_PAGES, SPACER_REGION_SHARE, SPACER_STEP
from kvstore.records.meta import COUNTERS_KEY, FORMAT_KEY, STORE_KEY, Counters, StoreRecord, encode_format

__all__ = ["drop_cached", "initialise"]


def initialise(environment: lmdb.Environment, max_bytes: int | None) -> bool:
    """Create the databases and the identity of a store that has none yet; return whether that was so."""
    with translated(), environment.begin() as txn:
        if environment.stat()["entries"] or txn.id():
            return False
    if max_bytes is None:
        raise StoreMissingError("the store was never finished; pass max_bytes to create it")
    page_bytes = int(environment.stat()["psize"])
    record = StoreRecord(secrets.token_bytes(16), 1, max_bytes, page_bytes, time.time_ns() // 1000)
    with translated(), environment.begin(write=True) as txn:
        db = Databases(*(environment.open_db(name.encode(), txn=txn) for name in DATABASES))
        txn.put(FORMAT_KEY, encode_format(), db=db.meta)
        txn.put(STORE_KEY, record.encode(), db=db.meta)
        txn.put(COUNTERS_KEY, Counters().encode(), db=db.meta)
    _space_out(environment, db.spacers, page_bytes)
    with translated():
        environment.sync(True)
    return True


def _space_out(environment: lmdb.Environment, spacers: lmdb._Database, page_bytes: int) -> None:
    """Prepare a region at the file's beginning in which only pages of the index find room.

    LMDB hands out free pages from the lowest number up, and a block takes the first run that is long enough. Where every
    eighth page stays in use no block fits; so index pages, which move with every transaction, gather here instead of breaking
    up the runs that blocks come and go in.
    """
    pages = int(environment.info()["map_size"]) // page_bytes
    region = min(pages // SPACER_REGION_SHARE, SPACER_REGION_PAGES)
    keys = [index.to_bytes(4, "big") for index in range(region)]
    with translated(), environment.begin(write=True) as txn:
        for key in keys:
            txn.put(key, bytes(page_bytes - PAGE_HEADER), db=spacers)
        for index, key in enumerate(keys):
            if index % SPACER_STEP:
                txn.delete(key, db=spacers)


def drop_cached(data: Path) -> None:
    """Forget the pages just written: the spacers went out in one run, as large folios that index pages would then share."""
    fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
