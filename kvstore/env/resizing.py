"""Changing the cap of a store that nobody else has open: raising it in place, lowering it by a compaction.

`set_mapsize` under readers kills their transactions, and in other processes even reading fails; so both need exclusive use.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path

import lmdb

from kvstore.env.environment import Environment, open_lmdb
from kvstore.env.opening import map_bytes_for, verify_file
from kvstore.env.transactions import Databases, Writer, translated
from kvstore.errors import CapError, StoreDamagedError, StoreFullError
from kvstore.records.block import BlockHeader, Ref
from kvstore.records.constants import DATA_FILE, DATABASES
from kvstore.records.meta import STORE_KEY, StoreRecord

__all__ = ["compact", "raise_cap"]

_MAP_SIZE_AT = 16 + 16  # offset of mm_mapsize in a meta page: page header, then magic, version and fixed address
_REFS_A_TRANSACTION = 4096


def raise_cap(environment: Environment, cap: int) -> None:
    """Raise the cap in place. The caller holds the store exclusively and closes it afterwards.

    Raises
    ------
    CapError
        When the cap isn't higher than the stored one.
    """
    record = environment.record
    if cap < record.cap:
        raise CapError(f"{cap} is lower than the cap of {record.cap}; lowering needs a compaction")
    environment.set_map_bytes(map_bytes_for(cap, record.page_bytes))
    with environment.write(timeout=10.0) as txn:
        txn.put(txn.db.meta, STORE_KEY, _with_cap(record, cap, record.generation).encode())


def compact(environment: Environment, cap: int) -> None:
    """Write the store anew, without free pages and with a lower cap, beside its directory, and put it in place.

    The caller holds the store exclusively, has evicted down to what fits, and closes the environment afterwards. A crash
    leaves the old file or the new one.

    Raises
    ------
    StoreFullError
        When the file system has no room for both files.
    StoreDamagedError
        When the copy does not verify; the store is left as it was.
    """
    record, home = environment.record, Path(environment.path)
    with environment.reading() as txn:
        needed = txn.live_pages() * record.page_bytes
    free = shutil.disk_usage(home.parent).free
    if free < needed + (64 << 20):
        raise StoreFullError(
            f"lowering the cap writes the store anew beside {home}: it takes {needed} bytes for a while, {free} are free there"
        )
    beside = Path(tempfile.mkdtemp(prefix=f".{home.name}.resize-", dir=home.parent))
    try:
        environment.copy_compact(str(beside))
        new = beside / DATA_FILE
        _set_map_bytes(new, record.page_bytes, map_bytes_for(cap, record.page_bytes))
        _rebuild_offsets(str(beside), _with_cap(record, cap, record.generation + 1))
        problems = verify_file(str(new))
        if problems:
            raise StoreDamagedError(f"the compacted copy does not verify: {problems[0]}; the store is left as it was")
        new.chmod(0o600)
        environment.release_file()
        new.replace(home / DATA_FILE)
        _sync_directory(home)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _with_cap(record: StoreRecord, cap: int, generation: int) -> StoreRecord:
    return StoreRecord(record.store_id, generation, cap, record.page_bytes, record.created)


def _set_map_bytes(data: Path, page_bytes: int, map_bytes: int) -> None:
    """Write the map size into both meta pages: LMDB itself only ever raises it."""
    with data.open("r+b") as file:
        for page in (0, 1):
            file.seek(page * page_bytes + _MAP_SIZE_AT)
            file.write(struct.pack("<Q", map_bytes))
        file.flush()
        os.fsync(file.fileno())


def _rebuild_offsets(directory: str, record: StoreRecord) -> None:
    """Record where the blocks lie in a compacted file. Reads every value, as LMDB's get does."""
    environment = open_lmdb(directory)
    try:
        with translated(), environment.begin(write=True) as txn:
            db = Databases(*(environment.open_db(name.encode(), txn=txn, create=False) for name in DATABASES))
        start: bytes | None = b""
        while start is not None:
            start = _rebuild_some(environment, db, record.page_bytes, start)
        with translated(), environment.begin(write=True) as txn:
            txn.put(STORE_KEY, record.encode(), db=db.meta)
    finally:
        environment.close()


def _rebuild_some(environment: lmdb.Environment, db: Databases, page_bytes: int, start: bytes) -> bytes | None:
    writer = Writer(environment, db, page_bytes)
    try:
        found: list[tuple[bytes, Ref]] = []
        following = None
        for key, raw in writer.items(db.refs, start):
            if len(found) == _REFS_A_TRANSACTION:
                following = key
                break
            found.append((key, Ref.decode(key, raw)))
        for key, ref in found:
            at = writer.locate(key)
            padded = BlockHeader.decode(writer.value_start(key)).padded_bytes
            moved = Ref(ref.count, ref.kind, ref.pages, at + padded, ref.payload_bytes, ref.tokens)
            writer.put(db.refs, key, moved.encode(key))
        with translated():
            writer.txn.commit()
    except BaseException:
        writer.txn.abort()
        raise
    return following


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
