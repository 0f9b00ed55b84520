"""One open store file: LMDB's environment, our own map of the data file, the two lock files."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.env.descriptors import open_data, open_direct
from kvstore.env.early import EarlyValues
from kvstore.env.engine import writer_of
from kvstore.env.faults import MapFaults
from kvstore.env.files import StoreFiles
from kvstore.env.readers import Readers
from kvstore.env.reserve import Reservation
from kvstore.env.settling import Settling
from kvstore.env.transactions import Databases, Reader, Writer, translated
from kvstore.env.values import ValuePages
from kvstore.errors import (
    CapError,
    DiskError,
    ForkedStoreError,
    KVStoreError,
    StoreBusyError,
    StoreClosedError,
    StoreDamagedError,
    WriteLockTimeout,
)
from kvstore.kernel import FileMap, FileSource, Window, read_headers, watch_here
from kvstore.locks import FileLock
from kvstore.records.constants import DATA_FILE
from kvstore.records.meta import STORE_KEY, SWEEP_KEY, StoreRecord, encode_sweep

__all__ = ["Environment"]

_made: weakref.WeakSet[Environment] = weakref.WeakSet()  # for forked children


class Environment:
    """An open store file. Shared by all handles of the process on one store; thread-safe.

    Made by `kvstore.env.opening` with one use counted. Handles, leases and transactions each count as a use, and the last to go
    closes the file: so nothing is unmapped under a call that is under way, whoever closes what meanwhile.

    Attributes
    ----------
    record : StoreRecord
        The store's identity as it was when it was opened.
    ended : str
        What becomes of it, and what to do, for who uses it after that.
    forked : bool
        Whether this is a forked child, which has only a copy that it must leave alone.
    companion : object
        What the layers above keep for the file as long as it is open.
    readers : Readers
        Who reads the store, in any process.
    source : FileSource
        The data file as the kernel restores from it. For who has counted a use.
    """

    def __init__(
        self,
        path: str,
        environment: lmdb.Environment,
        db: Databases,
        record: StoreRecord,
        open_lock: FileLock,
        write_lock: FileLock,
        file_identity: tuple[int, int],
    ) -> None:
        self.path = path
        self.record = record
        self.db = db
        self.page_bytes = record.page_bytes
        with translated():
            self.map_bytes = int(environment.info()["map_size"])
        self._lmdb = environment
        self._open_lock = open_lock
        self._write_lock = write_lock
        self._mutex = threading.Lock()
        self._closed = False
        self.forked = False
        self._uses = 1
        # re-entrant: the last view of a lease may die in a garbage collection inside these methods
        self._uses_guard = threading.RLock()
        self.gone = threading.Event()  # set once the file is really closed
        self.companion: object = None
        self.ended = "is closed; open it again"
        self.file_identity = file_identity
        self._files = StoreFiles(path, file_identity, open_lock, write_lock)
        with contextlib.ExitStack() as undo:
            self._data_fd = open_data(path)
            undo.callback(os.close, self._data_fd)
            if self._files.named() != file_identity:
                raise StoreBusyError(f"the file of the store at {path} was replaced while it was being opened; open it again")
            try:
                self.file_map = FileMap(self._data_fd, self.map_bytes)
            except OSError as error:
                raise CapError(
                    f"cannot map {self.map_bytes} bytes of {path}: {error.strerror}; lower the cap with Store.resize"
                ) from error
            undo.callback(self.file_map.close)
            self._direct_fd = open_direct(path, file_identity)
            if self._direct_fd is not None:
                undo.callback(os.close, self._direct_fd)
            self.source = FileSource(self.file_map, self._data_fd, self._direct_fd)
            self._settling = Settling(path, self._data_fd, self._last_transaction)
            self._values = ValuePages(os.path.join(path, DATA_FILE), self._data_fd, self.page_bytes)
            self._writer_fd = writer_of(environment)
            self.readers = Readers(self._lmdb, self.check_open)
            self._faults = MapFaults(path, environment, db, self.page_bytes, self._data_fd)
            undo.callback(self._faults.close)
            _made.add(self)
            undo.pop_all()

    @property
    def map_pages(self) -> int:
        """Pages that the file can ever have."""
        return self.map_bytes // self.page_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child."""
        return self._closed or self.forked

    def check_open(self) -> None:
        """Refuse use after close, and in a forked child.

        Raises
        ------
        StoreClosedError, ForkedStoreError
        """
        self.check_forked()
        if self._closed:
            raise StoreClosedError(f"the store at {self.path} {self.ended}")

    def check_forked(self) -> None:
        """Refuse use in a forked child, with ForkedStoreError, of what may outlive a close."""
        if self.forked:
            raise ForkedStoreError(
                f"the store at {self.path} was opened before this process was forked, and what was made from it is the parent's; "
                "open your own here with Store.open"
            )

    @property
    def shared(self) -> bool:
        """Whether more uses are counted than one."""
        return self._uses > 1

    def retain(self) -> None:
        """Count one more use. Raises StoreClosedError or ForkedStoreError once the last one has gone."""
        with self._uses_guard:
            self.check_open()
            self._uses += 1

    def release(self) -> None:
        """Give a use back; the last one closes the file. Does nothing in a forked child."""
        with self._uses_guard:
            if self.closed:
                return
            self._uses -= 1
            if self._uses:
                return
            self._closed = True
        self._close()

    def read(self) -> Reader:
        """Begin a read transaction. The caller has counted its use, and closes it.

        Raises
        ------
        StoreDamagedError
            When the file was cut off while it was open.
        """
        self.check_open()
        self._faults.check_length()
        watch_here()
        return Reader(self._lmdb, self.db, self._faults)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """A read transaction for the length of a `with` block."""
        self.retain()
        try:
            reader = self.read()
            try:
                yield reader
            finally:
                reader.close()
        finally:
            self.release()

    @contextlib.contextmanager
    def write(self, timeout: float, *, durable: bool = True) -> Iterator[Writer]:
        """The write transaction: committed durably when the block ends, aborted when it raises.

        Parameters
        ----------
        timeout : float
            Seconds to wait at most for other threads and processes, whatever state they are in.
        durable : bool
            False for a step of something longer: it is committed in order, and a power loss may undo it until the next commit
            of any process or `settle` is through. Nobody may be told that it is stored before that.

        Raises
        ------
        WriteLockTimeout
            When the lock wasn't to be had in time.
        StoreDamagedError
            When a lock file was deleted under us: two writers could be at work at once. When the disk has failed to keep what
            was written, or LMDB met pages that can't be read.
        StoreFullError, SpacePinned
            When there is no room.
        DiskError
            When the operating system fails to write.
        """
        self.retain()
        try:
            yield from self._write(timeout, durable)
        finally:
            self.release()

    def _write(self, timeout: float, durable: bool) -> Iterator[Writer]:
        deadline = time.monotonic() + timeout
        mutex = self._mutex  # a forked child has another
        if not mutex.acquire(timeout=max(timeout, 0)):
            raise WriteLockTimeout(f"another thread held the write lock of {self.path} for over {timeout} s; try again later")
        try:
            if not self._write_lock.acquire(exclusive=True, timeout=max(deadline - time.monotonic(), 0)):
                raise WriteLockTimeout(
                    f"another process held the write lock of {self.path} for over {timeout} s; it may be stopped or slow, try later"
                )
            try:
                self._files.check()
                yield from self._transaction(durable)
            finally:
                self._write_lock.release()
        finally:
            mutex.release()

    def _transaction(self, durable: bool) -> Iterator[Writer]:
        self._settling.check()
        self._faults.check()
        watch_here()
        with translated():
            early = EarlyValues(self._writer_fd, self.page_bytes) if EarlyValues.possible(self._writer_fd) else None
            writer = Writer(self._lmdb, self.db, self.page_bytes, self._values, early, self._faults)
        try:
            yield from self._committed(writer, durable)
        finally:
            if early is not None and not self.forked:
                early.end()  # whatever has interrupted what: nothing is written once the lock is given up

    def _committed(self, writer: Writer, durable: bool) -> Iterator[Writer]:
        try:
            yield writer
            if writer.damage:  # so that it is set right, whoever comes to it and however late
                writer.put(writer.db.meta, SWEEP_KEY, encode_sweep())
            writer.finish()  # first, since it may take a while
            self._faults.check()  # a page that is lost after this makes the commit fail
            writer.commit()
            self._faults.look()
        except BaseException as error:
            writer.abort()
            if self._faults.met and isinstance(error, KVStoreError) and not isinstance(error, StoreDamagedError | ForkedStoreError):
                raise self._faults.error() from error
            if isinstance(error, DiskError):
                raise self._settling.why(error) from error
            raise
        if durable:
            self._settling.settle()
        for offset, length in writer.freed:
            self._forget(offset, length)

    def settle(self) -> None:
        """Return once everything is durable that a transaction which begins now would see, whoever has committed it.

        Costs nothing where this process knows it already.

        Raises
        ------
        StoreDamagedError
            When the disk fails, or failed before. The kernel reports it once and forgets it, so writing is refused from then on.
        """
        self.retain()
        try:
            self._faults.check()
            self._settling.settle()
        finally:
            self.release()

    def _last_transaction(self) -> int:
        with translated():
            return int(self._lmdb.info()["last_txnid"])

    def reservation(self, new_pages: int) -> Reservation:
        """Disk space to be taken ahead of a save that writes `new_pages`: for what the file will grow by, beyond its free pages."""
        with self.reading() as txn:
            free = self.end_bytes() // self.page_bytes - txn.live_pages()
        start = self.end_bytes()
        growth = max(new_pages - free, 0) * self.page_bytes
        return Reservation(os.path.join(self.path, DATA_FILE), self.file_identity, start, min(start + growth, self.map_bytes))

    def end_bytes(self) -> int:
        """Where the file's last page ends, in bytes: what grows, grows from there."""
        self.check_open()
        with translated():
            return (int(self._lmdb.info()["last_pgno"]) + 1) * self.page_bytes

    def _forget(self, offset: int, length: int) -> None:
        """Drop what the page cache holds of a freed block: memory for what is live.

        It also keeps the next write there honest: a write into a large cached folio makes the kernel account all of it. A
        reader that still sees the block reads it from the disk again.
        """
        self.file_map.discard(offset, length)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._data_fd, offset, length, os.POSIX_FADV_DONTNEED)

    def window(self, offsets: npt.NDArray[np.uint64], piece: int, length: int) -> Window:
        """Pieces of the data file side by side, private to the process. See `Window`.

        Good as long as the caller's use of the environment and its transaction last.

        Raises OSError, and ForkedStoreError in a forked child.
        """
        self.check_open()
        return Window(self._data_fd, offsets, piece=piece, length=length)

    def pread(self, length: int, offset: int) -> bytes:
        """Read from the data file, so that a bad sector or a truncation is an error and not a signal."""
        return os.pread(self._data_fd, length, offset)

    def read_headers(
        self, offsets: npt.NDArray[np.int64], expected: npt.NDArray[Any], sums: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
        """Read many headers from the data file at once and check them: see `kvstore.kernel.read_headers`."""
        return read_headers(self._data_fd, offsets, expected, sums)

    def file_bytes(self) -> int:
        """Bytes that the store's directory takes on disk now."""
        total = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def set_map_bytes(self, map_bytes: int) -> None:
        """Enlarge LMDB's map. Needs exclusive use and no transaction; our own map stays as it was, so close afterwards."""
        self._faults.close()
        with translated():
            self._lmdb.set_mapsize(map_bytes)
        self._faults.moved()

    def copy_compact(self, directory: str) -> None:
        """Write a copy without free pages into an empty directory. Raises StoreDamagedError where something can't be read."""
        self._faults.read_all()
        watch_here()
        with translated():
            self._lmdb.copy(directory, compact=True)
        self._faults.check()

    def release_file(self) -> None:
        """Close LMDB's environment ahead of `close`, so that the file can be replaced. Needs exclusive use."""
        self._faults.close()
        with translated():
            self._lmdb.close()

    def exclusive(self, timeout: float) -> bool:
        """Try to become the only process that has the store open. Close the environment afterwards, whatever came of it.

        While it waits it holds nothing (flock can't be converted in one step), so the file may be replaced meanwhile: then this
        is another one's store, and the answer is False.
        """
        return self._open_lock.acquire(exclusive=True, timeout=timeout) and self._files.named() == self.file_identity

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.gone.set)
            stack.callback(self._open_lock.close)
            stack.callback(self._write_lock.close)
            stack.callback(os.close, self._data_fd)
            if self._direct_fd is not None:
                stack.callback(os.close, self._direct_fd)
            stack.callback(self.file_map.close)
            self.companion = None
            self._faults.close()
            with contextlib.suppress(KVStoreError), translated():
                self._lmdb.close()

    def unchanged(self) -> bool:
        """Whether the store's identity and map are those that it was opened with. For who holds it exclusively by now."""
        with self.reading() as txn:
            record = StoreRecord.decode(txn.get(STORE_KEY, self.db.meta) or b"")
        with translated():
            return record == self.record and int(self._lmdb.info()["map_size"]) == self.map_bytes

    def after_fork(self) -> None:
        """In a forked child: give up our descriptors (those of the lock files are closed already) and refuse every use."""
        self.forked = True
        self._mutex = threading.Lock()
        self._settling.after_fork()
        self._uses_guard = threading.RLock()
        if not self._closed:
            for descriptor in (self._data_fd, self._direct_fd):
                if descriptor is not None:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)


def _after_fork_in_child() -> None:
    for environment in list(_made):
        if not environment.gone.is_set():
            environment.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
