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
import threading
import time
import weakref

__all__ = ["FileLock"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01

# A forked child has copies of all descriptors, which would keep every lock for as long as it lives: it closes them. So that none is
# missed or closed twice, no fork falls between a change of a descriptor and the note of it. Re-entrant for handlers of signals.
_changing = threading.RLock()
_open: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock file that is held open. Not thread-safe: serialise its users within the process first.

    Parameters
    ----------
    path : str
        Created with mode 0600 if it isn't there. A symbolic link is refused (OSError, ELOOP).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with _changing:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _open.add(self)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
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
        """Give the lock back; the file stays open. Nothing is left to give back in a forked child."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self, length: int) -> bytes:
        """The first bytes of the file; nothing where it can't be read."""
        try:
            return os.pread(self._fd, length, 0)
        except OSError:
            return b""

    def write(self, content: bytes) -> None:
        """Make this the file's content, if it isn't. Where that fails the file is empty, which may fail as well.

        It's put over what is there, which needs no room on a disk that is full: emptied first it would.
        """
        if self.read(len(content) + 1) == content:
            return
        try:
            whole = os.pwrite(self._fd, content, 0) == len(content)
        except OSError:
            whole = False
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, len(content) if whole else 0)

    def in_place(self) -> bool:
        """Whether the file that is locked is still the one that the path names: a deleted lock file locks nobody out."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Close the descriptor, which ends the lock. Idempotent."""
        with _changing:
            descriptor, self._fd = self._fd, -1
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _after_fork_in_child() -> None:
    """Close the copies, and never unlock: the locks are the parent's."""
    global _changing
    _changing = threading.RLock()
    for lock in list(_open):
        lock.close()


os.register_at_fork(
    before=lambda: _changing.acquire() and None, after_in_parent=lambda: _changing.release(), after_in_child=_after_fork_in_child
)
