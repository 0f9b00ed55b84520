"""Changing the cap of a store that nobody else has open: raising it in place, lowering it by a compaction.

`set_mapsize` under readers kills their transactions, and in other processes even reading fails; so both need exclusive use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import lmdb

from kvstore.env.engine import open_lmdb
from kvstore.env.environment import Environment
from kvstore.env.leftovers import beside_of, remove_beside
from kvstore.env.opening import map_bytes_for
from kvstore.env.replacing import give_to_owner
from kvstore.env.transactions import Databases, Writer, translated
from kvstore.env.verifying import verify_file
from kvstore.errors import CapError, StoreDamagedError, StoreFullError, StoreOwnerError
from kvstore.records.block import BlockHeader, Ref
from kvstore.records.constants import DATA_FILE, DATABASES
from kvstore.records.meta import STORE_KEY, StoreRecord

__all__ = ["check_beside", "compact", "raise_cap"]

_MAP_SIZE_AT = 16 + 16  # offset of mm_mapsize in a meta page: page header, then magic, version and fixed address
_REFS_A_TRANSACTION = 4096

Progress = Callable[[str, int, int], None]


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


def compact(environment: Environment, cap: int, progress: Progress | None = None) -> None:
    """Write the store anew, without free pages and with a lower cap, beside its directory, and put it in place.

    The caller holds the store exclusively, has evicted down to what fits, and closes the environment afterwards. A crash
    leaves the old file or the new one; the copy that it may leave beside the directory goes with the next exclusive opener.

    Parameters
    ----------
    progress : callable, optional
        Called with (what, done, total), on this thread.

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
    beside = _make_beside(home, needed)
    try:
        new = beside / DATA_FILE
        if progress is None:
            environment.copy_compact(str(beside))
        else:
            _copy_watched(environment, new, needed, progress)
            progress("recording offsets", 0, 1)
        environment.check_forked()
        _set_map_bytes(new, record.page_bytes, map_bytes_for(cap, record.page_bytes))
        _rebuild_offsets(str(beside), _with_cap(record, cap, record.generation + 1))
        if progress is not None:
            progress("verifying the copy", 0, 1)
        problems = verify_file(str(new))
        if problems:
            raise StoreDamagedError(f"the compacted copy does not verify: {problems[0]}; the store is left as it was")
        new.chmod(0o600)
        give_to_owner(new, home / DATA_FILE)
        environment.check_forked()
        environment.release_file()
        new.replace(home / DATA_FILE)
        _sync_directory(home)
    finally:
        if not environment.forked:  # the copy is the parent's
            remove_beside(home)


def _copy_watched(environment: Environment, new: Path, needed: int, progress: Progress) -> None:
    """Copy on a thread of its own, and say here how far it is: LMDB doesn't."""
    with ThreadPoolExecutor(1, "kvstore-resize") as pool:
        copying = pool.submit(environment.copy_compact, str(new.parent))
        while not copying.done():
            with contextlib.suppress(FileNotFoundError):
                progress("copying", min(new.stat().st_size, needed), needed)
            environment.check_forked()  # the other thread is not here
            wait([copying], 0.1)
        copying.result()


def check_beside(environment: Environment, needed: int) -> None:
    """Refuse a compaction that would find no room for its copy of `needed` bytes, before anything is evicted for it.

    Raises
    ------
    StoreFullError, StoreOwnerError
    """
    _make_beside(Path(environment.path), needed).rmdir()


def _make_beside(home: Path, needed: int) -> Path:
    """Make the directory of the copy; what a killed resize has left there goes first. The store is held exclusively."""
    beside = beside_of(home)
    if home.stat().st_dev != home.parent.stat().st_dev:
        raise StoreFullError(
            f"{home} is a mount point: lowering the cap writes the store anew beside it, which is another file system; "
            "move the store into a directory of its own"
        )
    try:
        remove_beside(home)
        beside.mkdir(mode=0o700)
    except OSError as error:
        raise StoreOwnerError(f"lowering the cap needs the directory {beside} for a while: {error.strerror}") from error
    free = shutil.disk_usage(beside).free
    if free < needed + (64 << 20):
        beside.rmdir()
        raise StoreFullError(
            f"lowering the cap writes the store anew beside {home}: it takes {needed} bytes for a while, {free} are free there"
        )
    return beside


def _with_cap(record: StoreRecord, cap: int, generation: int) -> StoreRecord:
    return replace(record, generation=generation, cap=cap)


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
            txn.drop(db.spacers, delete=False)  # a compacted file has no region for index pages that they could keep free
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
            writer.put(db.refs, key, replace(ref, offset=at + padded).encode(key))
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return following


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
