"""kernel: gather and scatter with CRC32C, the bytes in memory, against the best plain copy of the same bytes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches import pagecache
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Target, median, pairs
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, Array, large_layout
from kvstore.kernel import FileMap, Rows, crc32c_paths, crc32c_with, force_crc32c, gather, scatter

__all__ = ["BENCH"]

_THREADS = 2
_SCATTER, _GATHER = 0.95, 0.90
_STREAMS = len(large_layout().streams)
_BLOCK = large_layout().block_tokens
_PAYLOAD = _BLOCK * TOKEN_BYTES
_SEGMENT = _PAYLOAD // _STREAMS
_VALUE = _PAYLOAD + (32 << 10)  # with its header, in whole pages of a store
_AT = 4 << 10  # of a payload in its value
_RING = 11  # blocks: 44 MiB, more than what a core complex's last cache holds
_SMALL_RING = 2  # blocks: what a save has in hand
_READS = (256 << 10, 1 << 20, 4 << 20)
# (blocks, pairs, rounds in which the candidates for the best plain copy are tried)
_SIZES: dict[Size, tuple[int, int, int]] = {"full": (391, 15, 3), "quick": (80, 9, 3), "smallest": (6, 2, 1)}

Bytes = npt.NDArray[np.uint8]
Candidate = Callable[[], None]


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * _VALUE
    return Needs(disk=total + (64 << 20), memory=3 * total + (1 << 30))


class _Threads:
    """Plain copies shared out to two threads, each of which takes the next few when it is done."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def each(self, work: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> None:
        """Call `work` with each tuple of arguments."""
        few = max(1, min(16, len(calls) // _THREADS))

        def some(start: int) -> None:
            for arguments in calls[start : start + few]:
                work(*arguments)

        for _ in self._pool.map(some, range(0, len(calls), few)):
            pass

    def copies(self, moves: Sequence[tuple[Array, Array]]) -> Candidate:
        """Make a candidate that copies by numpy."""
        return lambda: self.each(np.copyto, moves)

    def memmoves(self, moves: Sequence[tuple[Array, Array]]) -> Candidate:
        """Make a candidate that copies contiguous arrays by C's own function."""
        calls = [(to.ctypes.data, of.ctypes.data, of.nbytes) for to, of in moves]
        return lambda: self.each(ctypes.memmove, calls)


class _File:
    """A file of blocks as a store lays them out: written by the kernel, mapped and populated."""

    def __init__(self, path: Path, rows: Sequence[Rows], blocks: int) -> None:
        self.first = np.arange(blocks, dtype=np.int64) * _BLOCK
        self.tokens = np.full(blocks, _BLOCK, np.int64)
        self.sums = np.zeros((blocks, len(rows)), np.uint32)
        value = np.zeros(_VALUE, np.uint8)
        address = np.array([value.ctypes.data + _AT], np.uint64)
        with path.open("wb", buffering=0) as file:
            for b in range(blocks):
                self.sums[b] = gather(rows, address, self.first[b : b + 1], self.tokens[:1])[0]
                file.write(value.data)
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        length = blocks * _VALUE
        self._map = FileMap(self.fd, length)
        times = [time.perf_counter()]
        for _ in range(2):
            self._map.populate(0, length)
            times.append(time.perf_counter())
        self.populate_ms = [(b - a) * 1e3 for a, b in pairwise(times)]
        self.addresses = np.uint64(self._map.address + _AT) + np.arange(blocks, dtype=np.uint64) * np.uint64(_VALUE)
        self.bytes: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self._map.address))
        self.payloads: Bytes = self.bytes.reshape(blocks, _VALUE)[:, _AT : _AT + _PAYLOAD]

    def scatter(self, rows: Sequence[Rows]) -> None:
        """Copy all blocks into arrays, checked."""
        if (scatter(rows, self.addresses, self.first, self.tokens, self.tokens, self.sums, threads=_THREADS) >= 0).any():
            raise AssertionError("a checksum differs")

    def segments(self) -> npt.NDArray[np.uint8]:
        """All segments, shape (block, stream, byte)."""
        return self.payloads.reshape(self.payloads.shape[0], _STREAMS, _SEGMENT)

    def close(self) -> None:
        """End the map: no view may be used any more."""
        del self.bytes, self.payloads
        self._map.close()
        os.close(self.fd)


def _pread(fd: int, into: Sequence[memoryview], at: int) -> None:
    if os.preadv(fd, into, at) != sum(map(len, into)):
        raise AssertionError("a short read")


def _reads(file: _File, engine: Bytes, size: int, threads: _Threads) -> Candidate:
    """Read the payloads into the engine's arrays, shape (stream, block, byte of a segment), `size` bytes a call."""
    calls = []
    for b in range(engine.shape[1]):
        for start in range(0, _PAYLOAD, size):
            at = b * _VALUE + _AT + start
            calls.append((file.fd, [engine[s, b].data for s in range(start // _SEGMENT, (start + size) // _SEGMENT)], at))
    return lambda: threads.each(_pread, calls)


def _pieces(to: Bytes, of: Bytes) -> list[tuple[Array, Array]]:
    """As few and as large pieces as there are threads; large enough for the C library to copy past the caches."""
    to, of = to.reshape(-1), of.reshape(-1)[: to.size]
    step = -(-to.size // _THREADS)
    return [(to[i : i + step], of[i : i + step]) for i in range(0, to.size, step)]


class _Bench:
    """What the pairs share: where the results go, and how a pair is judged."""

    def __init__(self, context: Context, total: int) -> None:
        _, self._count, self._rounds = _SIZES[context.size]
        self._context, self._total = context, total
        self.outcome = context.outcome

    def compare(self, name: str, kernel: Candidate, plain: Mapping[str, Candidate]) -> float:
        """Find the fastest plain copy, pair the kernel with it; return the median of the pairs' ratios of speed."""
        tried = {key: median(s) for key, s in pairs(self._context, f"{name}: plain", self._rounds, plain).items()}
        best = min(tried, key=lambda key: tried[key])
        seconds = pairs(self._context, name, self._count, {"plain": plain[best], "kernel": kernel})
        ratio = median([p / k for p, k in zip(seconds["plain"], seconds["kernel"], strict=True)])
        with Watch() as watch:
            kernel()
        speed = {side: self._total / median(s) / 1e9 for side, s in seconds.items()}
        self.outcome.figures[name] = {
            "ratio": ratio,
            "best_plain": best,
            "tried_gb_s": {key: self._total / s / 1e9 for key, s in tried.items()},
            "plain_gb_s": speed["plain"],
            "kernel_gb_s": speed["kernel"],
            "rss_anon_mib": watch.above_mib,
            "seconds": seconds,
        }
        self.outcome.lines.append(
            f"{name:30} kernel {speed['kernel']:5.2f} GB/s, best plain copy {speed['plain']:5.2f} GB/s ({best}), "
            f"ratio {ratio:.3f}; RssAnon {watch.above_mib:+.1f} MiB"
        )
        return ratio

    def paths(self, file: _File, rows: Sequence[Rows], threads: _Threads, flat: Bytes) -> None:
        """Time each way to compute CRC32C alone and in a scatter, in turns, for orientation."""
        candidates: dict[str, Candidate] = {}
        parts = [(path, part) for path in crc32c_paths() for part in np.array_split(flat, _THREADS)]

        def scattered(path: str) -> None:
            force_crc32c(path)
            try:
                file.scatter(rows)
            finally:
                force_crc32c(None)

        for path in crc32c_paths():
            own = [p for p in parts if p[0] == path]
            candidates[f"crc32c, {path}"] = lambda own=own: threads.each(crc32c_with, own)  # type: ignore[misc]
            candidates[f"scatter, {path}"] = lambda path=path: scattered(path)  # type: ignore[misc]
        taken = pairs(self._context, "each path", self._rounds, candidates)
        speeds = {name: self._total / median(s) / 1e9 for name, s in taken.items()}
        self.outcome.figures["paths_gb_s"] = speeds
        self.outcome.lines.append("GB/s: " + "; ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()))


def _scatters(bench: _Bench, file: _File, flat: Bytes, threads: _Threads) -> float:
    """Pairs of scatters into arrays of three shapes; return the ratio of the first."""
    blocks = file.first.size
    engine, segments = flat.reshape(_STREAMS, blocks, _SEGMENT), file.segments()
    by_stream = [(engine[s, b], segments[b, s]) for s in range(_STREAMS) for b in range(blocks)]
    by_block = [(engine[s, b], segments[b, s]) for b in range(blocks) for s in range(_STREAMS)]
    rows = _rows(flat)
    flat.fill(1)
    file.scatter(rows)
    if not all(np.array_equal(to, of) for to, of in by_stream):
        raise AssertionError("what was scattered is not what the file holds")
    ratio = bench.compare(
        "scatter",
        lambda: file.scatter(rows),
        {
            "numpy, stream by stream": threads.copies(by_stream),
            "numpy, block by block": threads.copies(by_block),
            "memmove, stream by stream": threads.memmoves(by_stream),
            "memmove, two pieces": threads.memmoves(_pieces(flat, file.bytes)),
            **{f"pread, {size >> 10} KiB": _reads(file, engine, size, threads) for size in _READS},
        },
    )

    heads = flat.reshape(_STREAMS, 2, blocks * _BLOCK, 512)
    split = segments.reshape(blocks, _STREAMS, 2, _BLOCK, 512)
    moves = [
        (heads[s, h, b * _BLOCK : (b + 1) * _BLOCK], split[b, s, h]) for s in range(_STREAMS) for h in (0, 1) for b in range(blocks)
    ]
    head_rows = [Rows.strided(heads[s], axis=1) for s in range(_STREAMS)]
    bench.compare("scatter, head-major", lambda: file.scatter(head_rows), {"numpy": threads.copies(moves)})

    mixed = flat.reshape(blocks * _BLOCK, _STREAMS, 1024)
    short = segments.reshape(blocks, _STREAMS, _BLOCK, 1024)
    moves = [(mixed[b * _BLOCK : (b + 1) * _BLOCK, s], short[b, s]) for s in range(_STREAMS) for b in range(blocks)]
    short_rows = [Rows.strided(mixed[:, s], axis=0) for s in range(_STREAMS)]
    bench.compare("scatter, runs of 1 KiB", lambda: file.scatter(short_rows), {"numpy": threads.copies(moves)})
    bench.paths(file, rows, threads, flat)
    return ratio


def _gathers(bench: _Bench, file: _File, flat: Bytes, threads: _Threads) -> tuple[float, float]:
    """Pairs of gathers into buffers of three sizes; return the ratios of the large ring and of the whole."""
    blocks = file.first.size
    engine = flat.reshape(_STREAMS, blocks, _SEGMENT)
    whole = np.ones((blocks, _PAYLOAD), np.uint8)

    def into(ring: int, rows: Sequence[Rows]) -> Candidate:
        addresses = np.uint64(whole.ctypes.data) + np.arange(ring, dtype=np.uint64) * np.uint64(_PAYLOAD)

        def run() -> None:
            for at in range(0, blocks, ring):
                count = min(ring, blocks - at)
                gather(rows, addresses[:count], file.first[at : at + count], file.tokens[:count], threads=_THREADS)

        return run

    def plain(ring: int) -> dict[str, Candidate]:
        to = whole.reshape(blocks, _STREAMS, _SEGMENT)
        rings = [range(at, min(at + ring, blocks)) for at in range(0, blocks, ring)]
        moves = [(to[b % ring, s], engine[s, b]) for part in rings for s in range(_STREAMS) for b in part]
        return {"numpy": threads.copies(moves), "memmove": threads.memmoves(moves)}

    rows = _rows(flat)
    file.scatter(rows)
    into(blocks, rows)()
    if not np.array_equal(whole, file.payloads):
        raise AssertionError("what was gathered is not what the file holds")
    large = bench.compare(f"gather, {_RING * _PAYLOAD >> 20} MiB reused", into(_RING, rows), plain(_RING))
    all_of_it = bench.compare(
        "gather, the whole",
        into(blocks, rows),
        {**plain(blocks), "memmove, two pieces": threads.memmoves(_pieces(whole, flat))},
    )
    bench.compare(f"gather, {_SMALL_RING * _PAYLOAD >> 20} MiB reused", into(_SMALL_RING, rows), plain(_SMALL_RING))
    mixed, to = flat.reshape(blocks * _BLOCK, _STREAMS, 1024), whole.reshape(blocks, _STREAMS, _BLOCK, 1024)
    moves = [(to[b, s], mixed[b * _BLOCK : (b + 1) * _BLOCK, s]) for s in range(_STREAMS) for b in range(blocks)]
    short_rows = [Rows.strided(mixed[:, s], axis=0) for s in range(_STREAMS)]
    bench.compare("gather, runs of 1 KiB", into(blocks, short_rows), {"numpy": threads.copies(moves)})
    return large, all_of_it


def _rows(flat: Bytes) -> list[Rows]:
    return [Rows.strided(a, axis=0) for a in flat.reshape(_STREAMS, -1, _SEGMENT // _BLOCK)]


def _run(context: Context) -> Outcome:
    blocks = _SIZES[context.size][0]
    total = blocks * _PAYLOAD
    context.say(f"writing {total / 1e9:.2f} GB to a file")
    flat = np.empty(total, np.uint8)
    random = np.random.default_rng(6)
    for part in np.array_split(flat, max(1, total >> 23)):
        part[:] = np.frombuffer(random.bytes(part.size), np.uint8)
    bench = _Bench(context, total)
    file = _File(context.scratch / "blocks", _rows(flat), blocks)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            threads = _Threads(pool)
            scattered = _scatters(bench, file, flat, threads)
            ring, whole = _gathers(bench, file, flat, threads)
        in_cache = pagecache.resident(context.scratch / "blocks")
        if in_cache < 0.98:
            bench.outcome.doubts.append(f"only {100 * in_cache:.1f}% of the file are in the page cache")
    finally:
        file.close()
    outcome = bench.outcome
    first, again = file.populate_ms
    outcome.figures |= {"bytes": total, "threads": _THREADS, "populate_ms": {"first": first, "again": again}}
    outcome.lines.append(f"populating the map: {first:.1f} ms, once more {again:.1f} ms; not part of the figures above")
    outcome.tables, outcome.plots = _tables(outcome.figures), _plots(outcome.figures)
    outcome.targets = [
        Target("scatter: speed over that of the best plain copy", scattered, _SCATTER, at_most=False),
        Target("gather into reused buffers: speed over that of the best plain copy", ring, _GATHER, at_most=False),
        Target("gather into new buffers: speed over that of the best plain copy", whole, _GATHER, at_most=False),
    ]
    return outcome


def _compared(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in figures.items() if isinstance(found, dict) and "best_plain" in found}


def _tables(figures: dict[str, Any]) -> list[Table]:
    paths = figures["paths_gb_s"]
    copying = {name: speed for name, speed in paths.items() if name.startswith("scatter")}
    return [
        Table(
            f"{figures['bytes'] / 1e9:.2f} GB, {_THREADS} threads",
            ("", "with CRC32C, GB/s", "best plain copy, GB/s", "ratio to it", "which that is", "own memory, MiB"),
            tuple(
                (name, f["kernel_gb_s"], f["plain_gb_s"], f["ratio"], f["best_plain"], f["rss_anon_mib"])
                for name, f in _compared(figures).items()
            ),
        ),
        Table(
            "Each way to compute the sum",
            ("instructions", "CRC32C alone, GB/s", "scatter with it, GB/s", "ratio to the fastest scatter"),
            tuple(
                (path, paths[f"crc32c, {path}"], speed, speed / max(copying.values()))
                for path, speed in ((name.removeprefix("scatter, "), speed) for name, speed in copying.items())
            ),
            "In turns, for orientation.",
        ),
    ]


def _plots(figures: dict[str, Any]) -> list[Plot]:
    found = _compared(figures)
    sides = {"best plain copy": "plain_gb_s", "with CRC32C": "kernel_gb_s"}
    return [
        Plot(
            "speed",
            "Copies of the kernel, and the best plain ones",
            "",
            "GB/s",
            {side: [(float(place), f[key]) for place, f in enumerate(found.values())] for side, key in sides.items()},
            bars=True,
            groups=tuple(found),
        )
    ]


_METHOD = """\
The kernel's two inner loops alone, on a file of 391 blocks of 4 MiB, laid out as in a store, mapped and populated beforehand:
scatter copies blocks into arrays and checks each segment's CRC32C in the same pass, gather copies rows into blocks and computes
it. Against it the fastest of several plain copies of the same bytes with as many threads (numpy and memmove in several orders,
for scatter also pread of 256 KiB to 4 MiB), found in a few rounds first; then both take turns. Destinations were touched before.
Reused buffers are a ring of 44 MiB, more than the caches hold, or of 8 MiB, as in a save; "the whole" is as many bytes of memory
as of rows. The streams lie one after another, or with their heads in front, or row by row in runs of 1 KiB."""

_BEHIND = """\
Gathering into a ring of 8 MiB. It stays in the processor's caches as long as plain copies write it with ordinary stores, so
that they save the way to memory; with the sums computed in the same pass there is more to do than to copy. With rings that
the caches can't hold, or rows that lie apart, the kernel is ahead. A save gathers while the disk writes, which takes several
times as long."""

BENCH = Bench("kernel", "gather and scatter with CRC32C against the best plain copy", _needs, _run, _METHOD, _BEHIND)
