"""Reading and writing a file past the page cache, without this package: what the device gives."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benches import pagecache

__all__ = ["DEPTHS", "SIZES", "Way", "best_way", "read_all", "write_all"]

SIZES = (256 << 10, 1 << 20, 4 << 20)  # bytes of a read
DEPTHS = (1, 2, 4, 8)  # reads at once
_HUGE = 2 << 20


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """How raw reads are made.

    Attributes
    ----------
    size : int
        Bytes of a read.
    depth : int
        Reads at once.
    huge : bool
        Whether they go into huge pages, where the system has some. A device takes so many separate pages in a request only.
    """

    size: int
    depth: int
    huge: bool

    def __str__(self) -> str:
        return f"{self.size >> 10} KiB x {self.depth}" + (" into huge pages" if self.huge else "")


def _buffer(size: int, huge: bool) -> memoryview:
    """Memory from the beginning of a (huge) page on, touched."""
    if not huge:
        memory = mmap.mmap(-1, size)
        memory.write(b"\x01" * size)
        return memoryview(memory)
    memory = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -np.frombuffer(memory, np.uint8).__array_interface__["data"][0] % _HUGE
    view = memoryview(memory)[skip : skip + size]
    view[:] = b"\x01" * size
    return view


def read_all(path: Path, way: Way, length: int) -> float:
    """Read the first `length` bytes of a file with O_DIRECT, in order, and give the seconds it took.

    Each of the threads reads into a buffer of its own, touched beforehand, over and over: nothing is kept.
    """
    pagecache.drop(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        return _side_by_side(way, length, lambda buffer, at: os.preadv(fd, [buffer], at))
    finally:
        os.close(fd)


def write_all(path: Path, way: Way, length: int) -> float:
    """Write the first `length` bytes of a file anew with O_DIRECT, in order; give the seconds until they are durable.

    The file exists and is that long already, so that no space has to be found. `length` is a multiple of 4 KiB.
    """
    pagecache.drop(path)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        start = time.perf_counter()
        _side_by_side(way, length, lambda buffer, at: os.pwritev(fd, [buffer[: min(way.size, length - at)]], at))
        os.fdatasync(fd)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def _side_by_side(way: Way, length: int, move: Callable[[memoryview, int], int]) -> float:
    """Let threads move the pieces of a file, each with a buffer of its own; give the seconds."""
    size = way.size
    buffers = [_buffer(size, way.huge) for _ in range(way.depth)]
    pieces = iter(range(0, length, size))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work(buffer: memoryview) -> None:
        try:
            while True:
                with lock:
                    at = next(pieces, None)
                if at is None:
                    return
                if move(buffer, at) < min(size, length - at):
                    raise OSError(f"a short read or write at {at}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failed:
        raise failed[0]
    return seconds


def best_way(
    path: Path, length: int, rounds: int, say: Callable[[str], None], *, write: bool = False
) -> tuple[Way, dict[str, list[float]]]:
    """Try all ways, and give the one with the least median time, with the seconds of all."""
    seconds: dict[Way, list[float]] = {}
    move, what = (write_all, "writes") if write else (read_all, "reads")
    ways = [Way(size, depth, huge) for size in SIZES for depth in DEPTHS for huge in (False, True)]
    for place in range(rounds):
        for way in ways if place % 2 == 0 else reversed(ways):
            seconds.setdefault(way, []).append(move(path, way, length))
        say(f"raw {what}, {len(ways)} ways: {place + 1} of {rounds}")
    best = min(seconds, key=lambda way: sorted(seconds[way])[len(seconds[way]) // 2])
    return best, {str(way): taken for way, taken in seconds.items()}
