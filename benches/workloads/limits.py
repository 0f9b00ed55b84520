"""limits: what this machine gives at best, without kvstore: copies, checksums, hashes, raw reads and writes of the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from benches import direct, pagecache
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, median, pairs, quantile
from kvstore.kernel import crc32c_paths, crc32c_with

__all__ = ["BENCH"]

_PIECE = 8 << 20  # bytes between two fdatasync; of a part that a thread takes
# (bytes, rounds, rounds of all raw ways)
_SIZES: dict[Size, tuple[int, int, int]] = {
    "full": (1 << 30, 9, 3),
    "quick": (256 << 20, 5, 1),
    "smallest": (8 << 20, 1, 1),
}

Bytes = npt.NDArray[np.uint8]


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0]
    return Needs(disk=2 * total + (64 << 20), memory=3 * total + (256 << 20))


class _Shared:
    """Work cut into parts, which one thread or all do."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self._pool, self._threads = pool, threads

    def over(self, work: Callable[..., object], parts: Sequence[tuple[Any, ...]], *, every: bool) -> None:
        if not every:
            for part in parts:
                work(*part)
            return

        def some(first: int) -> None:
            for part in parts[first :: self._threads]:
                work(*part)

        for _ in self._pool.map(some, range(self._threads)):
            pass


def _parts(data: Bytes) -> list[Bytes]:
    return [data[at : at + _PIECE] for at in range(0, data.size, _PIECE)]


def _hash(part: Bytes) -> None:
    blake3(part.data).digest()


def _processor(context: Context, source: Bytes, file: Path) -> dict[str, list[float]]:
    """Seconds of everything that the processor and the memory do, by name."""
    _, rounds, _ = _SIZES[context.size]
    threads = len(os.sched_getaffinity(0))
    into = np.ones_like(source)
    view: Bytes = np.memmap(file, np.uint8, mode="r")
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    parts = _parts(source)
    copies = list(zip(_parts(into), parts, strict=True))
    mapped = list(zip(_parts(into), _parts(view), strict=True))
    reads = [([part], at * _PIECE) for at, part in enumerate(_parts(into))]
    try:
        with ThreadPoolExecutor(threads) as pool:
            shared = _Shared(pool, threads)
            sides: dict[str, Callable[[], None]] = {}
            for every in (False, True):
                who = f", {threads} threads" if every else ", 1 thread"
                work: dict[str, tuple[Callable[..., object], Sequence[tuple[Any, ...]]]] = {
                    "copy": (np.copyto, copies),
                    "copy from a map of a file": (np.copyto, mapped),
                    "read from the page cache": (lambda into, at: os.preadv(fd, into, at), reads),
                    "BLAKE3": (_hash, [(part,) for part in parts]),
                    **{f"CRC32C ({path})": (crc32c_with, [(path, part) for part in parts]) for path in crc32c_paths()},
                }
                for name, (call, arguments) in work.items():
                    sides[name + who] = partial(shared.over, call, arguments, every=every)
            return pairs(context, "copies, sums, hashes", rounds, sides)
    finally:
        del view, mapped
        os.close(fd)


def _buffered(path: Path, source: Bytes) -> None:
    """Write a file that is there already anew, through the page cache, durably piece by piece."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for at in range(0, source.size, _PIECE):
            os.pwrite(fd, source[at : at + _PIECE].data, at)
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _device(context: Context, source: Bytes, file: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of reading and writing the device in the best ways, and which those are."""
    _, rounds, tries = _SIZES[context.size]
    total = source.size
    read, reads = direct.best_way(file, total, tries, context.say)
    write, writes = direct.best_way(file, total, tries, context.say, write=True)
    one = {name: direct.Way(4 << 20, 1, False) for name in ("read", "write")}

    def buffered() -> None:
        pagecache.drop(file)
        _buffered(file, source)

    seconds = pairs(
        context,
        "raw reads and writes",
        rounds,
        {
            "raw read, one at a time": lambda: direct.read_all(file, one["read"], total),
            "raw read, the best way": lambda: direct.read_all(file, read, total),
            "raw write, one at a time": lambda: direct.write_all(file, one["write"], total),
            "raw write, the best way": lambda: direct.write_all(file, write, total),
            "write, fdatasync every 8 MiB": buffered,
        },
    )
    return seconds, {"read_way": str(read), "write_way": str(write), "reads_seconds": reads, "writes_seconds": writes}


def _run(context: Context) -> Outcome:
    total, _, _ = _SIZES[context.size]
    source: Bytes = np.frombuffer(np.random.default_rng(1).bytes(total), np.uint8)
    file = context.scratch / "plain"
    with file.open("wb", buffering=0) as made:
        for part in _parts(source):
            made.write(part.data)
        os.fdatasync(made.fileno())
    threads = len(os.sched_getaffinity(0))
    processor = _processor(context, source, file)
    device, ways = _device(context, source, file)
    limit = f"copy, {threads} threads"
    outcome = context.outcome
    outcome.figures |= {"bytes": total, "threads": threads, **ways, "seconds": processor | device}
    outcome.figures["gb_s"] = {name: total / median(taken) / 1e9 for name, taken in (processor | device).items()}
    outcome.tables = [
        _table(f"Processor and memory, {total >> 20} MiB", processor, total, limit, f"of {limit}"),
        _table(
            f"The device, {total >> 20} MiB, durable where it is written",
            device,
            total,
            "raw read, the best way",
            "of the best raw read",
            f"Raw reads and writes go past the page cache (O_DIRECT). The best of {len(ways['reads_seconds'])} ways each: reads of "
            f"{ways['read_way']}, writes of {ways['write_way']}. Files are written where they lie already.",
        ),
    ]
    outcome.lines = [f"{name:34} {speed:6.2f} GB/s" for name, speed in outcome.figures["gb_s"].items()]
    outcome.lines.append(f"best raw reads: {ways['read_way']}; best raw writes: {ways['write_way']}")
    names = tuple(outcome.figures["gb_s"])
    outcome.plots = [
        Plot(
            "speeds",
            "What this machine gives at best",
            "",
            "GB/s",
            {"median": [(float(n), outcome.figures["gb_s"][name]) for n, name in enumerate(names)]},
            bars=True,
            groups=names,
        )
    ]
    return outcome


def _table(title: str, seconds: dict[str, list[float]], total: int, limit: str, ratio: str, note: str = "") -> Table:
    rows = [
        (
            name,
            total / median(taken) / 1e9,
            total / quantile(taken, 0.9) / 1e9,
            median([other / own for other, own in zip(seconds[limit], taken, strict=True)]),
        )
        for name, taken in seconds.items()
    ]
    return Table(title, ("what", "GB/s, median", "GB/s that 90% of the rounds reach", ratio), tuple(rows), note)


BENCH = Bench(
    "limits",
    "what the machine gives at best: copies, CRC32C, BLAKE3, raw reads and writes",
    _needs,
    _run,
    "Random bytes, in parts of 8 MiB, by one thread or shared out among one for each processor; all take turns, every other round "
    "in reverse order. Raw reads and writes are tried in all sizes and depths first, with small and huge pages.",
)
