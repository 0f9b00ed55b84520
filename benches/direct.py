"""Reading a file past the page cache, without this package: what the device gives."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benches import pagecache

__all__ = ["DEPTHS", "SIZES", "best_way", "read_all"]

SIZES = (256 << 10, 512 << 10, 1 << 20, 4 << 20)  # bytes of a read
DEPTHS = (1, 2, 4, 8, 16)  # reads at once


def read_all(path: Path, size: int, depth: int, length: int) -> float:
    """Read the first `length` bytes of a file with O_DIRECT, in order, and give the seconds it took.

    Each of `depth` threads reads into a buffer of its own, touched beforehand, over and over: nothing is kept.
    """
    pagecache.drop(path)
    buffers = [mmap.mmap(-1, size) for _ in range(depth)]
    for buffer in buffers:
        buffer.write(b"\x01" * size)
    pieces = iter(range(0, length, size))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work(buffer: mmap.mmap) -> None:
        try:
            while True:
                with lock:
                    at = next(pieces, None)
                if at is None:
                    return
                if os.preadv(fd, [buffer], at) < min(size, length - at):
                    raise OSError(f"a short read at {at} of {path}")
        except BaseException as error:
            failed.append(error)

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
    finally:
        os.close(fd)
        for buffer in buffers:
            buffer.close()
    if failed:
        raise failed[0]
    return seconds


def best_way(path: Path, length: int, rounds: int, say: Callable[[str], None]) -> tuple[int, int, dict[str, list[float]]]:
    """Try all sizes and depths, and give the pair with the least median time, with the seconds of all."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for place in range(rounds):
        ways = [(size, depth) for size in SIZES for depth in DEPTHS]
        for way in ways if place % 2 == 0 else reversed(ways):
            seconds.setdefault(way, []).append(read_all(path, *way, length))
        say(f"raw reads, all sizes and depths: {place + 1} of {rounds}")
    size, depth = min(seconds, key=lambda way: sorted(seconds[way])[len(seconds[way]) // 2])
    return size, depth, {f"{s >> 10} KiB x {d}": taken for (s, d), taken in seconds.items()}
