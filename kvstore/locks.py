"""Lock files with a time limit: what serialises openers and writers across processes.

LMDB's own write lock waits without limit behind a stopped process, so every write takes one of these first. The lock is
flock(2)'s: it belongs to the open file description, ends with the last descriptor of it (so a killed process frees it),
and is left alone by the closing of other descriptors of the same file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

__all__ = ["FileLock"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01


class FileLock:
    """A lock file that is held open. Not thread-safe: serialise its users within the process first.

    Parameters
    ----------
    path : str
        Created with mode 0600 if it isn't there. A symbolic link is refused (OSError, ELOOP).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", path)

    def acquire(self, *, exclusive: bool, timeout: float) -> bool:
        """Take the lock, or convert the one held; return False when `timeout` seconds pass. 0 tries once.

        A conversion gives up the lock that is held first: another process may take it in between, and after a failure nothing
        is held.
        """
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(self._fd, operation)
                return True
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR):
                    raise
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def release(self) -> None:
        """Give the lock back; the file stays open."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def in_place(self) -> bool:
        """Whether the file that is locked is still the one that the path names: a deleted lock file locks nobody out."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Close the descriptor, which ends the lock unless a forked child holds a copy. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
