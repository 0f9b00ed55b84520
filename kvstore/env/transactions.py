"""Transactions: thin wrappers that name the databases and turn LMDB's errors into ours."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import lmdb

from kvstore.env.early import EarlyValues
from kvstore.env.values import P_OVERFLOW, PageHead, ValuePages
from kvstore.errors import (
    DiskError,
    ForkedStoreError,
    IndexDamaged,
    KVStoreError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
)
from kvstore.records.constants import DATABASES, PAGE_HEADER

__all__ = ["Databases", "MapFull", "Reader", "Writer", "translated"]


class MapFull(StoreFullError):
    """LMDB found no contiguous run of free pages for a value. The transaction is dead."""


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of the named databases; each is passed to `get`, `put` and so on."""

    meta: Any
    namespaces: Any
    children: Any
    nodes: Any
    usage: Any
    blocks: Any
    refs: Any
    bad: Any
    roots: Any
    spacers: Any

    def all(self) -> list[Any]:
        """All handles."""
        return [getattr(self, name) for name in DATABASES]


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    lmdb.ProblemError,
    lmdb.BadValsizeError,
    lmdb.BadDbiError,
    # damaged flags, sizes and numbers of pages make LMDB take a valid call for one that isn't
    lmdb.IncompatibleError,
    lmdb.InvalidParameterError,
    lmdb.PageFullError,
    lmdb.NotFoundError,
    lmdb.KeyExistsError,
)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_LOOK_EVERY = 8  # records of a walk after which the file's length is looked at, which takes as long as some records
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_FAILED = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.EREMOTEIO)


def translate(error: lmdb.Error) -> KVStoreError:
    """The error of this package for one of LMDB's, with what to do next."""
    if isinstance(error, lmdb.MapFullError):
        return MapFull(f"no contiguous free pages in the store ({error}); raise the cap with Store.resize")
    if isinstance(error, lmdb.ReadersFullError):
        return StoreBusyError(f"all reader slots of the store are taken ({error}); close leases or processes")
    if isinstance(error, lmdb.DiskError | lmdb.MemoryError):
        return _refused(error)
    if isinstance(error, lmdb.PanicError):
        return StoreDamagedError(
            f"a write to the store's first pages has failed before, and LMDB refuses to go on ({error}): close the store in this "
            "process, with its leases and views, and open it again"
        )
    found = _of_system(getattr(error, "code", 0), error)
    if found is not None:
        return found
    if isinstance(error, _DAMAGE):
        return StoreDamagedError(f"LMDB reports damage: {error}; verify the store")
    return KVStoreError(f"LMDB reports: {error}")


def _refused(error: Exception) -> StoreFullError:
    return StoreFullError(f"the operating system refused a write or memory: {error}; make room on the disk")


def _of_system(code: int, error: Exception) -> KVStoreError | None:
    """The error for one of the operating system's numbers; None for a number that says nothing of the kind."""
    if code in _FULL:
        return _refused(error)
    if code in _TOO_MANY:
        return StoreBusyError(f"{error}: close some, or raise the limit (ulimit -n), and try again")
    if code in _FAILED:
        return DiskError(
            f"the operating system failed to write or read the store's file ({error}): what was being saved is not stored; "
            "look at the disk, and whether it or a quota is full"
        )
    return None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn LMDB's exceptions into this package's."""
    try:
        yield
    except lmdb.Error as error:
        raise translate(error) from error


class Doubt(Protocol):
    """Whether what isn't found may be there all the same, since something of the file could not be read."""

    @property
    def lost(self) -> int:
        """How many pages of the index could not be read."""

    @property
    def met(self) -> bool:
        """Whether there were any, or the file has been cut off."""

    def check_length(self) -> None:
        """Raise `error` if the file has been cut off."""

    def error(self) -> StoreDamagedError:
        """The error that says why."""


class Reader:
    """A read transaction: one consistent state of the store. May be used and ended on any one thread at a time.

    It pins every page that is freed after it began, so keep it short.
    """

    __slots__ = ("_doubt", "_pid", "_txn", "db", "transaction")

    def __init__(self, environment: lmdb.Environment, db: Databases, doubt: Doubt | None = None) -> None:
        with translated():
            self._txn: lmdb.Transaction = environment.begin(buffers=False)
        self.db = db
        self.transaction: int = self._txn.id()
        self._doubt = doubt
        self._pid = os.getpid()

    def _failed(self, error: lmdb.Error) -> KVStoreError:
        return self._doubt.error() if self._doubt is not None and self._doubt.met else translate(error)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Where LMDB reports damage, say what it comes from, if that is known."""
        try:
            yield
        except StoreDamagedError as error:
            if self._doubt is not None and self._doubt.met:
                raise self._doubt.error() from error
            raise

    def get(self, key: bytes, db: Any) -> bytes | None:
        """Read a record as bytes; None when there is none."""
        try:
            return self._txn.get(key, None, db)  # type: ignore[return-value]  # bytes: begun without buffers
        except lmdb.Error as error:
            raise self._failed(error) from error

    def get_each(self, keys: Iterable[bytes], db: Any) -> list[bytes | None]:
        """Read many records of a database, in the order of the keys; None for those that there are not."""
        get = self._txn.get
        try:
            return [get(key, None, db) for key in keys]  # type: ignore[misc]  # bytes: begun without buffers
        except lmdb.Error as error:
            raise self._failed(error) from error

    def entries(self, database: Any) -> int:
        """How many records a database has."""
        try:
            return int(self._txn.stat(database)["entries"])
        except lmdb.Error as error:
            raise self._failed(error) from error

    def items(self, database: Any, start: bytes = b"", *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the records from key `start` on, in key order. `keys_only` leaves large values untouched.

        Raises
        ------
        StoreDamagedError
            At the end, where records may be missing because pages of the file could not be read; in between, where it was cut off.
        """
        with self._explained():
            yield from _items(self._txn, database, start, keys_only, self._doubt)
        if self._doubt is not None and self._doubt.lost:
            raise self._doubt.error()

    def last_key(self, database: Any) -> bytes:
        """The last key of a database, empty if it has none."""
        with self._explained():
            return _last_key(self._txn, database)

    def live_pages(self) -> int:
        """Pages in use over all databases, from LMDB's own counters: there is no counter of ours to drift."""
        with self._explained():
            return _live_pages(self._txn, self.db)

    def close(self) -> None:
        """End the transaction. Idempotent. In a forked child it does nothing: the slot belongs to the parent."""
        if self._pid == os.getpid():
            self._txn.abort()


class Writer:
    """The write transaction. Made by `Environment.write`, used on the thread that made it."""

    __slots__ = (
        "_doubt",
        "_early",
        "_pid",
        "_values",
        "damage",
        "db",
        "freed",
        "page_bytes",
        "placed",
        "stuck",
        "transaction",
        "txn",
    )

    def __init__(
        self,
        environment: lmdb.Environment,
        db: Databases,
        page_bytes: int,
        values: ValuePages | None = None,
        early: EarlyValues | None = None,
        doubt: Doubt | None = None,
    ) -> None:
        self.txn: lmdb.Transaction = environment.begin(write=True, buffers=True)
        self.db = db
        self.page_bytes = page_bytes
        self.damage = False  # set where the index was found damaged, so that it is set right afterwards
        self.freed: list[tuple[int, int]] = []  # (offset, length) of runs that hold nothing once this is committed
        self.placed: set[bytes] = set()  # blocks that it has put: they aren't in the file yet
        self.stuck: list[bytes] = []  # blocks that it had to leave where they are, since they can't be freed
        self._values = values
        self._early = early
        self._doubt = doubt
        self.transaction: int = self.txn.id()
        self._pid = os.getpid()

    def finish(self) -> None:
        """Wait for what is written already, right before `commit`. Raises as that does, and DiskError, StoreFullError."""
        if self._pid != os.getpid():
            raise ForkedStoreError("this process was forked in the middle of a write, which goes on in the parent; write anew here")
        if self._early is not None:
            try:
                self._early.finish(self._value)
            except OSError as error:
                raise _of_system(error.errno or 0, error) or KVStoreError(f"a value can't be written: {error}") from error

    def commit(self) -> None:
        """Commit. Raises ForkedStoreError in a child that was forked in the middle of it: the transaction is the parent's."""
        self.finish()
        with translated():
            self.txn.commit()

    def abort(self) -> None:
        """Undo everything. Idempotent. In a forked child it does nothing."""
        if self._pid == os.getpid():
            try:
                if self._early is not None:
                    self._early.end()
            finally:
                self.txn.abort()

    def get(self, key: bytes, db: Any) -> bytes | None:
        """Read a record as bytes; None when there is none. Not for blocks: see `value_start`."""
        try:
            value = self.txn.get(key, None, db)
        except lmdb.Error as error:
            raise translate(error) from error
        return None if value is None else bytes(value)

    def put(self, database: Any, key: bytes, value: Any) -> None:
        """Write a record, replacing one of the same key.

        Raises
        ------
        MapFull
            When there is no room; the transaction must be aborted.
        """
        with translated():
            self.txn.put(key, value, db=database)

    def delete(self, database: Any, key: bytes) -> bool:
        """Delete a record; return whether it was there."""
        with translated():
            return bool(self.txn.delete(key, db=database))

    def can_free(self, key: bytes, payload: int, pages: int) -> bool:
        """Whether a block's value can be freed, or replaced: see `ValuePages.sound`. Its bytes are lost to everybody by that."""
        return self._values is None or key in self.placed or self._values.sound(payload, pages)

    def put_block(self, key: bytes, value: memoryview) -> int:
        """Store a block's value; return the file offset at which it starts. A large one is on its way there when this returns.

        Its page number is final as soon as it is put (LMDB writes it in front of the value). The memory stays the caller's, and
        must not change before the transaction has ended.

        Raises
        ------
        MapFull
            When there is no room; the transaction must be aborted.
        StoreDamagedError
            When the value does not lie where a large value lies.
        """
        self.delete(self.db.blocks, key)  # a value put over an old one would be copied into the old one's pages
        self.put(self.db.blocks, key, value)
        self.placed.add(key)
        head = self._placed(key)
        if self._early is not None:
            self._early.begin(key, head, value)
        return head.page * self.page_bytes + PAGE_HEADER

    def locate(self, key: bytes) -> int:
        """File offset at which a block's value starts. Raises StoreDamagedError when it does not lie where a large value lies."""
        head = self._placed(key)
        return head.page * self.page_bytes + PAGE_HEADER

    def _placed(self, key: bytes) -> PageHead:
        value = self._value(key)
        if value is None:
            raise IndexDamaged(f"block {key.hex()} is not in the store; verify the store")
        head = PageHead.of(value)
        if not head.flags & P_OVERFLOW or head.page < 2:
            raise StoreDamagedError(f"LMDB put a block at page {head.page} with flags {head.flags:#x}, expected an overflow page")
        return head

    def _value(self, key: bytes) -> Any:
        """A block's value in LMDB's memory, or None."""
        with translated():
            return self.txn.get(key, db=self.db.blocks)

    def value_start(self, key: bytes, length: int = 64 << 10) -> bytes:
        """The first bytes of a block's value: at least its header."""
        value = self.txn.get(key, db=self.db.blocks)
        return b"" if value is None else bytes(value[:length])

    def entries(self, database: Any) -> int:
        """How many records a database has."""
        with translated():
            return int(self.txn.stat(database)["entries"])

    def items(self, database: Any, start: bytes = b"", *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """As `Reader.items`. Don't write while iterating."""
        return _items(self.txn, database, start, keys_only, self._doubt)

    def last_key(self, database: Any) -> bytes:
        """As `Reader.last_key`."""
        return _last_key(self.txn, database)

    def live_pages(self) -> int:
        """Pages in use over all databases, this transaction's changes included."""
        return _live_pages(self.txn, self.db)


def _items(txn: Any, database: Any, start: bytes, keys_only: bool, doubt: Doubt | None) -> Iterator[tuple[bytes, bytes]]:
    """Iterate. LMDB ends the process where it goes on to a page of zeros, as a file that was cut off has them: so look out."""
    look = _nothing if doubt is None else doubt.check_length
    with translated(), txn.cursor(db=database) as cursor:
        look()
        found = cursor.set_range(start) if start else cursor.first()
        passed = 0
        while found:
            yield bytes(cursor.key()), b"" if keys_only else bytes(cursor.value())
            passed += 1
            if passed % _LOOK_EVERY == 0:
                look()
            found = cursor.next()


def _nothing() -> None:
    """Look at nothing: while a store is being made there is nobody else."""


def _last_key(txn: Any, database: Any) -> bytes:
    with translated(), txn.cursor(db=database) as cursor:
        return bytes(cursor.key()) if cursor.last() else b""


def _live_pages(txn: Any, db: Databases) -> int:
    with translated():
        stats = [txn.stat(handle) for handle in db.all()]
    # the main database (names of the others) is a page of its own, as are the two meta pages
    return 3 + sum(int(s["branch_pages"]) + int(s["leaf_pages"]) + int(s["overflow_pages"]) for s in stats)
