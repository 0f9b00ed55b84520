"""Opening and creating a store's directory: everything that is checked before LMDB sees a byte of it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb

from kvstore.env.creating import drop_cached, initialise
from kvstore.env.engine import open_lmdb
from kvstore.env.entry import enter, share
from kvstore.env.environment import Environment
from kvstore.env.leftovers import remove_leftovers
from kvstore.env.pages import read_facts, what_to_do, write_empty
from kvstore.env.place import check_file_system, check_room, warn_of_room
from kvstore.env.transactions import Databases, translated
from kvstore.env.verifying import verify_file
from kvstore.errors import (
    CapError,
    ForkedStoreError,
    IndexDamaged,
    KVStoreError,
    NotAStoreError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    StoreMissingError,
    StoreOwnerError,
)
from kvstore.locks import FileLock
from kvstore.records.constants import (
    DATA_FILE,
    DATABASES,
    DEFAULT_PAGE_BYTES,
    LMDB_LOCK_FILE,
    LOCK_RESERVE,
    NEW_DATA_FILE,
    OPEN_LOCK_FILE,
    WRITE_LOCK_FILE,
)
from kvstore.records.meta import FORMAT_KEY, STORE_KEY, StoreRecord, decode_format

__all__ = ["MIN_CAP", "locked_files", "map_bytes_for", "open_environment"]

_log = logging.getLogger("kvstore")

_MIN_PAGES = 128  # LMDB's trees, their copies under way, and room to evict in
MIN_CAP = LOCK_RESERVE + _MIN_PAGES * DEFAULT_PAGE_BYTES
MAX_CAP = 1 << 45  # the file is mapped twice, by LMDB and by us, in an address space of 47 bits
_OURS = {DATA_FILE, LMDB_LOCK_FILE, OPEN_LOCK_FILE, WRITE_LOCK_FILE, NEW_DATA_FILE}


def map_bytes_for(cap: int, page_bytes: int) -> int:
    """Size of the map of a store: the cap less what lock files and directory take, in whole pages.

    Raises
    ------
    CapError
        When that is too little to work in.
    """
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise CapError(f"max_bytes must be an integer number of bytes, got {cap!r}")
    if cap < MIN_CAP:
        raise CapError(f"max_bytes is {cap}, a store needs at least {MIN_CAP} (and room for its layouts' blocks): raise it")
    if cap > MAX_CAP:
        raise CapError(f"max_bytes is {cap}, a process can map at most {MAX_CAP}: lower it")
    return (cap - LOCK_RESERVE) // page_bytes * page_bytes


def open_environment(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None,
    lock_timeout: float,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    any_owner: bool = False,
    any_filesystem: bool = False,
    whole_cap: bool = True,
) -> Environment:
    """Open the store at `path`, or create it when there is none and `max_bytes` is given.

    The first opener verifies the file's structure before LMDB opens it; a later one takes its word. With `whole_cap` a new store's
    disk has to have room for all of its cap; a repair knows what it will write.

    Raises
    ------
    NotAStoreError, StoreMissingError, StoreOwnerError, StoreDamagedError, FormatVersionError, CapError, StoreBusyError
    SharingError
    """
    directory = os.path.realpath(os.fspath(path))
    _check_directory(directory, max_bytes, any_owner=any_owner, any_filesystem=any_filesystem, whole_cap=whole_cap)
    made = [name for name in (OPEN_LOCK_FILE, WRITE_LOCK_FILE) if not (Path(directory) / name).exists()]
    with contextlib.ExitStack() as undo:
        open_lock, write_lock = _lock_files(directory)
        undo.callback(open_lock.close)
        undo.callback(write_lock.close)
        first = enter(open_lock, directory, lock_timeout, ready=lambda: _has_begun(Path(directory) / DATA_FILE))
        try:
            environment = _open_locked(
                directory, max_bytes, page_bytes, first, lock_timeout, open_lock, write_lock, len(made) < 2, whole_cap
            )
        except NotAStoreError:
            for name in made:  # leave a foreign directory as it was found
                (Path(directory) / name).unlink(missing_ok=True)
            raise
        undo.pop_all()
        return environment


@contextlib.contextmanager
def locked_files(directory: str, *, lock_timeout: float, any_owner: bool, any_filesystem: bool, purpose: str) -> Iterator[None]:
    """Both lock files of a directory, held exclusively for the length of a `with` block. LMDB sees nothing of it.

    Raises
    ------
    StoreBusyError, StoreOwnerError, NotAStoreError, StoreMissingError
    """
    _check_directory(directory, None, any_owner=any_owner, any_filesystem=any_filesystem)
    made = [name for name in (OPEN_LOCK_FILE, WRITE_LOCK_FILE) if not (Path(directory) / name).exists()]
    with contextlib.ExitStack() as undo:
        locks = _lock_files(directory)
        for lock in locks:
            undo.callback(lock.close)
        if not all(lock.acquire(exclusive=True, timeout=lock_timeout) for lock in locks):
            raise StoreBusyError(f"{directory} is open in another process; close it everywhere before you {purpose} it")
        try:
            yield
        except NotAStoreError:
            for name in made:  # leave a foreign directory as it was found
                (Path(directory) / name).unlink(missing_ok=True)
            raise


def _check_directory(
    directory: str, max_bytes: int | None, *, any_owner: bool, any_filesystem: bool, whole_cap: bool = True
) -> None:
    at = Path(directory)
    try:
        there_already = at.exists()
    except OSError as error:
        raise StoreOwnerError(
            f"{directory} cannot be reached: {error.strerror}; check the permissions of what leads to it"
        ) from error
    if not there_already:
        if max_bytes is None:
            raise StoreMissingError(f"there is no store at {directory}; pass max_bytes to create one")
        map_bytes_for(max_bytes, DEFAULT_PAGE_BYTES)
        above = next(above for above in at.parents if above.exists())
        check_file_system(str(above), any_filesystem=any_filesystem)
        if whole_cap:
            check_room(str(above), max_bytes, 0)
        try:
            _make_directories(at)
        except OSError as error:
            raise _cannot(f"cannot create {directory}", error, "choose a directory you can write") from error
    if not at.is_dir():
        raise NotAStoreError(f"{directory} is a file; a store is a directory")
    if not os.access(directory, os.W_OK | os.X_OK | os.R_OK):
        raise StoreOwnerError(f"{directory} is not writable: a store needs its lock files even to read; check its permissions")
    check_file_system(directory, any_filesystem=any_filesystem)
    _check_owner(at, {os.geteuid(), 0}, any_owner=any_owner)  # who owns it can put other files in the place of ours
    for name in sorted(_OURS):
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(at / name)
            if not stat.S_ISREG(there.st_mode):
                raise StoreOwnerError(f"{at / name} is not a regular file (a symbolic link?); a store does not follow it")
            _check_owner(at / name, {os.geteuid()}, any_owner=any_owner)
            if not os.access(at / name, os.R_OK | os.W_OK) and os.path.lexists(at / name):
                raise StoreOwnerError(
                    f"{at / name} cannot be read and written by user {os.geteuid()} (its owner is {there.st_uid}, its mode "
                    f"{stat.S_IMODE(there.st_mode):04o}); check its permissions"
                )
    if not (at / DATA_FILE).exists():
        foreign = sorted(entry.name for entry in at.iterdir() if entry.name not in _OURS)
        if foreign:
            raise NotAStoreError(f"{directory} holds {foreign[0]!r} and no store; choose an empty directory or a new one")
        if max_bytes is None:
            raise StoreMissingError(f"there is no store in {directory}; pass max_bytes to create one")
        map_bytes_for(max_bytes, DEFAULT_PAGE_BYTES)
        if whole_cap:
            check_room(directory, max_bytes, 0)


def _check_owner(at: Path, trusted: set[int], *, any_owner: bool) -> None:
    owner = os.lstat(at).st_uid
    if not any_owner and owner not in trusted:
        raise StoreOwnerError(
            f"{at} belongs to user {owner}, this process runs as {os.geteuid()}; pass any_owner=True (--any-owner) to trust it"
        )


def _make_directories(at: Path) -> None:
    """Make a directory and what leads to it, durably: the name of each stands in the one above it."""
    made = [at, *(above for above in at.parents if not above.exists())]
    at.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in reversed(made):
        with contextlib.suppress(PermissionError):  # one that may be entered and not listed can't be opened
            _sync_directory(directory.parent)


def _sync_directory(directory: str | Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot(what: str, error: OSError, advice: str) -> KVStoreError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreBusyError(f"{what}: {error.strerror}; close some, or raise the limit (ulimit -n), and try again")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"{what}: {error.strerror}; make room on the disk")
    return StoreOwnerError(f"{what}: {error.strerror}; {advice}")


def _lock_files(directory: str) -> tuple[FileLock, FileLock]:
    try:
        open_lock = FileLock(str(Path(directory) / OPEN_LOCK_FILE))
        try:
            return open_lock, FileLock(str(Path(directory) / WRITE_LOCK_FILE))
        except BaseException:
            open_lock.close()
            raise
    except OSError as error:
        raise _cannot(f"cannot open the lock files in {directory}", error, "a store needs them even to read") from error


def _has_begun(data: Path) -> bool:
    """Whether a data file is there and a transaction was ever committed to it, or something else is the matter with it."""
    if not data.exists():
        return False
    try:
        return read_facts(str(data)).transaction > 0
    except (KVStoreError, OSError):
        return True


def _open_locked(
    directory: str,
    max_bytes: int | None,
    page_bytes: int,
    first: bool,
    lock_timeout: float,
    open_lock: FileLock,
    write_lock: FileLock,
    had_locks: bool,
    whole_cap: bool,
) -> Environment:
    data = Path(directory) / DATA_FILE
    if first:
        if not data.exists() or _unborn(data):
            _create_file(directory, max_bytes, page_bytes, whole_cap)
        _check_file(data, had_locks)
    if not write_lock.acquire(exclusive=True, timeout=lock_timeout):
        raise StoreBusyError(f"another process held the write lock of {directory} for over {lock_timeout} s; try later")
    # Under the write lock with its time limit, because LMDB's own lock has none: opening the file waits for it when its lock
    # file is new, and handles of databases outlive the transaction that opened them only if that is a write transaction
    # (py-lmdb ends a read transaction by a reset, and the handles with it).
    try:
        if not first:
            _facts(data, had_locks)  # of a file that nobody changes meanwhile
        environment = _open_file(directory, data)
        try:
            if first and initialise(environment, max_bytes):
                environment.close()
                drop_cached(data)
                environment = _open_file(directory, data)
            record, db = _read_identity(environment, directory)
            _check_map(environment, directory, record)
            if max_bytes is not None and max_bytes != record.cap:
                raise CapError(
                    f"the store at {directory} has a cap of {record.cap} bytes, max_bytes is {max_bytes}; "
                    "open it with max_bytes=None, or change the cap with Store.resize (python -m kvstore resize)"
                )
            with translated():
                environment.reader_check()
            if first:
                remove_leftovers(Path(directory))
            # Only now: on an overlay LMDB's opening for writing copies the file up, and the copy may have another identity.
            there = os.stat(data, follow_symlinks=False)
            warn_of_room(directory, record.cap, there.st_blocks * 512)
        except BaseException:
            environment.close()
            raise
    finally:
        write_lock.release()
    try:
        if first:
            share(open_lock, directory, lock_timeout)
        return Environment(directory, environment, db, record, open_lock, write_lock, (there.st_dev, there.st_ino))
    except BaseException as error:
        environment.close()
        if isinstance(error, OSError) and not isinstance(error, KVStoreError):
            raise _cannot(f"cannot open {data}", error, "check its permissions") from error
        raise


def _open_file(directory: str, data: Path) -> lmdb.Environment:
    try:
        return open_lmdb(directory, metasync=False)
    except (ForkedStoreError, StoreBusyError, StoreFullError):
        raise
    except KVStoreError as error:
        raise StoreDamagedError(f"LMDB cannot open {data}: {error}; {what_to_do(data)}") from error


def _check_map(environment: lmdb.Environment, directory: str, record: StoreRecord) -> None:
    """Refuse a file whose map isn't that of the cap: the meta pages, which have no checksum, say how far the file may grow."""
    with translated():
        found = int(environment.stat()["psize"]), int(environment.info()["map_size"])
    try:
        expected = record.page_bytes, map_bytes_for(record.cap, record.page_bytes)
    except CapError:
        expected = record.page_bytes, 0
    if found != expected:
        raise StoreDamagedError(
            f"the meta pages of the store at {directory} are damaged: they say pages of {found[0]} bytes and a map of {found[1]}, "
            f"the cap of {record.cap} makes that {expected[0]} and {expected[1]}; {what_to_do(Path(directory) / DATA_FILE)}"
        )


def _unborn(data: Path) -> bool:
    """Whether a creator died after it put the file in place and before it wrote anything into it."""
    try:
        facts = read_facts(str(data))
    except (KVStoreError, OSError):
        return False
    return facts.transaction == 0 and facts.file_bytes <= 2 * facts.page_bytes


def _create_file(directory: str, max_bytes: int | None, page_bytes: int, whole_cap: bool) -> None:
    if max_bytes is None:
        raise StoreMissingError(f"there is no store in {directory}; pass max_bytes to create one")
    if whole_cap:
        check_room(directory, max_bytes, 0)
    new = Path(directory) / NEW_DATA_FILE
    new.unlink(missing_ok=True)
    try:
        write_empty(str(new), page_bytes=page_bytes, map_bytes=map_bytes_for(max_bytes, page_bytes))
        new.rename(Path(directory) / DATA_FILE)
        _sync_directory(directory)
    except OSError as error:
        raise _cannot(f"cannot create a store in {directory}", error, "check its permissions") from error


def _facts(data: Path, had_locks: bool) -> None:
    try:
        facts = read_facts(str(data))
        if facts.map_bytes > MAX_CAP:
            raise StoreDamagedError(
                f"{data} has damaged meta pages: they say that the file may take {facts.map_bytes} bytes; {what_to_do(data)}"
            )
    except NotAStoreError as error:
        if had_locks:  # our lock files stand beside it: it was a store
            raise StoreDamagedError(
                f"{data} does not begin like the data file of a store, which it was: its first pages are damaged; "
                f"{what_to_do(data)}"
            ) from error
        raise
    except KVStoreError:
        raise
    except PermissionError as error:
        raise StoreOwnerError(f"cannot read {data}: {error.strerror}; check its permissions") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _cannot(f"cannot read {data}", error, "") from error
        raise StoreDamagedError(f"cannot read {data}: {error.strerror}; {what_to_do(data)}") from error


def _check_file(data: Path, had_locks: bool) -> None:
    _facts(data, had_locks)
    started = time.monotonic()
    try:
        problems = verify_file(str(data))
    except OSError as error:
        raise _cannot(f"cannot verify {data}", error, "") from error
    _log.debug("verified the structure of %s in %.3f s", data, time.monotonic() - started)
    if problems:
        raise StoreDamagedError(f"{data} is damaged ({len(problems)} problems, first: {problems[0]}); {what_to_do(data)}")


def _read_identity(environment: lmdb.Environment, directory: str) -> tuple[StoreRecord, Databases]:
    """Read what the store is, and open its databases. Changes nothing."""
    foreign = NotAStoreError(f"{directory} holds an LMDB file that is no kvstore; choose another directory")
    try:
        with environment.begin() as txn:  # a look first: a foreign file is not even begun to be written to
            if b"meta" not in environment.dbs(txn=txn):
                raise foreign
        with environment.begin(write=True) as txn:
            meta = environment.open_db(b"meta", txn=txn, create=False)
            version = txn.get(FORMAT_KEY, db=meta)
            if version is None:
                raise foreign
            decode_format(version)
            record = StoreRecord.decode(txn.get(STORE_KEY, db=meta) or b"")
            db = Databases(*(environment.open_db(name.encode(), txn=txn, create=False) for name in DATABASES))
    except lmdb.NotFoundError as error:
        raise foreign from error
    except lmdb.Error as error:
        raise StoreDamagedError(
            f"the identity of the store at {directory} cannot be read: {error}; {what_to_do(Path(directory) / DATA_FILE)}"
        ) from error
    except IndexDamaged as error:
        raise StoreDamagedError(
            f"the identity of the store at {directory} is damaged: {error}; {what_to_do(Path(directory) / DATA_FILE)}"
        ) from error
    return record, db
