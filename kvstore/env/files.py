"""What the names of a store's files stand for, as long as it is open: a file that was deleted or replaced locks nobody out."""

from __future__ import annotations

import os

from kvstore.env.entry import check_holder, holder
from kvstore.errors import StoreDamagedError
from kvstore.locks import FileLock
from kvstore.records.constants import DATA_FILE, LMDB_LOCK_FILE

__all__ = ["StoreFiles"]


class StoreFiles:
    """The files of a store as they were when it was opened. Thread-safe.

    Parameters
    ----------
    path : str
        The store.
    identity : tuple of int
        Device and inode of its data file.
    open_lock, write_lock : FileLock
        Its lock files, which are held open. Stay the caller's.
    """

    def __init__(self, path: str, identity: tuple[int, int], open_lock: FileLock, write_lock: FileLock) -> None:
        self._path = path
        self._identity = identity
        self._open_lock = open_lock
        self._write_lock = write_lock
        self._holder = holder(open_lock)
        self._lmdb_lock = self._stat_lmdb_lock()

    def named(self) -> tuple[int, int] | None:
        """Device and inode of the file that has the data file's name now; None where there is none."""
        try:
            there = os.stat(os.path.join(self._path, DATA_FILE), follow_symlinks=False)
        except OSError:
            return None
        return there.st_dev, there.st_ino

    def check(self) -> None:
        """Refuse to write where a file was deleted or replaced. For who holds the write lock.

        Raises
        ------
        StoreDamagedError, SharingError
        """
        try:
            whole = self._stat_lmdb_lock() == self._lmdb_lock
        except OSError:
            whole = False
        if not whole or not self._write_lock.in_place() or not self._open_lock.in_place():
            raise StoreDamagedError(
                f"a lock file in {self._path} was deleted or replaced while the store was open; writing is refused, since "
                "another process could write at the same time: close the store in every process and open it again"
            )
        if holder(self._open_lock) != self._holder:  # nobody rewrites it while it is shared, where flock holds
            check_holder(self._open_lock, self._path)
        if self.named() != self._identity:
            raise StoreDamagedError(
                f"the data file in {self._path} was deleted or replaced while the store was open; what would be written is lost: "
                "close the store and open it again"
            )

    def _stat_lmdb_lock(self) -> tuple[int, int]:
        # Looked at, never opened: closing any descriptor of lock.mdb drops the locks that LMDB holds in this process.
        there = os.stat(os.path.join(self._path, LMDB_LOCK_FILE), follow_symlinks=False)
        return there.st_dev, there.st_ino
