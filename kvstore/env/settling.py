"""Waiting until what was committed is on the disk, and what becomes of a disk that fails then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvstore.errors import DiskError, KVStoreError, StoreDamagedError, StoreFullError

__all__ = ["Settling"]

_LITTLE_ROOM = 1 << 20  # a full file system may still count a few blocks as free


class Settling:
    """What this process knows of a data file's durability. Thread-safe.

    Parameters
    ----------
    path : str
        The store, for messages.
    fd : int
        A descriptor of the data file that nobody else waits on: one of its own is told of a failure even if LMDB's was told
        before. Stays the caller's.
    last_transaction : callable
        Gives the number of the last transaction that was committed, by whatever process.
    """

    def __init__(self, path: str, fd: int, last_transaction: Callable[[], int]) -> None:
        self._path = path
        self._fd = fd
        self._last_transaction = last_transaction
        self._lock = threading.Lock()  # taken last of all locks
        self._settled = -1  # the last transaction of which this process knows that it is on the disk
        self._distrusted = False

    def settle(self) -> None:
        """Return once everything is durable that is committed now. Costs nothing where this process knows it already.

        Raises
        ------
        StoreDamagedError
            When the disk fails. The kernel reports that once and forgets it, so `check` refuses from then on.
        """
        # One at a time: of two waits on one descriptor that a failure falls into, only one is told of it.
        with self._lock:
            self.check()  # a second wait would succeed, with nothing written
            last = self._last_transaction()
            if last <= self._settled:
                return
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._distrusted = True
                raise StoreDamagedError(
                    f"the disk failed to keep what was written to {self._path}: {error.strerror}; what was saved last may be gone "
                    "after a power loss, close the store in every process and look at the disk"
                ) from error
            self._settled = last

    def check(self) -> None:
        """Refuse to go on, with StoreDamagedError, where the disk has failed before."""
        if self._distrusted:
            raise StoreDamagedError(
                f"the disk has failed to keep what was written to {self._path}; writing is refused: close the store in every "
                "process, look at the disk, and open the store again"
            )

    def why(self, error: DiskError) -> KVStoreError:
        """Name a full disk where a commit failed for that: LMDB takes a write that ended early for a fault of the disk."""
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize >= _LITTLE_ROOM:
            return error
        return StoreFullError(f"the disk that the store at {self._path} lies on is full: a write ended early; make room on it")

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that isn't there."""
        self._lock = threading.Lock()
