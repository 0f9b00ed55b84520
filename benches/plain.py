"""Plain files with the bytes of a session: what a restore and a save are compared with."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benches.sessions import Array, pieces

__all__ = ["PlainFile", "write_plain"]

_READ = 1 << 20  # bytes of a read; from 256 KiB to 4 MiB none was clearly better


def write_plain(path: Path, arrays: dict[str, Array]) -> None:
    """Write arrays one after another into a file."""
    with path.open("wb", buffering=0) as file:
        for piece in pieces(arrays, 8 << 20):
            for part in piece:
                file.write(part)


class PlainFile:
    """A plain file with the bytes of arrays, brought back in the two ways that are the baselines of a restore.

    Parameters
    ----------
    path : Path
        What `write_plain` has written.
    into : dict of str to ndarray
        Where to; C-contiguous.
    pool : ThreadPoolExecutor
        With as many threads.
    threads : int
    """

    def __init__(self, path: Path, into: dict[str, Array], pool: ThreadPoolExecutor, threads: int) -> None:
        self._path = path
        self._into = [a.reshape(-1).view(np.uint8) for a in into.values()]
        self._pool, self._threads = pool, threads
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.view: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")

    def copy(self) -> None:
        """Copy out of the map, array by array, each cut evenly among the threads."""
        at = 0
        work: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = []
        for array in self._into:
            source = self.view[at : at + array.size]
            at += array.size
            step = -(-array.size // self._threads)
            starts = range(0, array.size, step)
            work += [(array[start : start + step], source[start : start + step]) for start in starts]
        for _ in self._pool.map(lambda pair: np.copyto(pair[0], pair[1]), work):
            pass

    def read(self) -> None:
        """Read into the arrays, in pieces shared out among the threads."""
        at = 0
        work: list[tuple[npt.NDArray[np.uint8], int]] = []
        for array in self._into:
            work += [(array[start : start + _READ], at + start) for start in range(0, array.size, _READ)]
            at += array.size
        for got, (array, _) in zip(self._pool.map(lambda one: os.preadv(self._fd, [one[0]], one[1]), work), work, strict=True):
            if got != array.size:
                raise AssertionError("a short read of the plain file")

    def map_anew(self) -> None:
        """Map the file anew: every page is met for the first time again."""
        del self.view
        self.view = np.memmap(self._path, np.uint8, mode="r")

    def close(self) -> None:
        """Unmap and close it."""
        del self.view
        os.close(self._fd)

    def same(self) -> bool:
        """Whether the arrays hold what the file does."""
        at = 0
        for array in self._into:
            if not np.array_equal(array, self.view[at : at + array.size]):
                return False
            at += array.size
        return True
