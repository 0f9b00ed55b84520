"""sizes: saving and restoring sessions of all sizes, from the page cache and from the disk, in all ways that there are."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benches import direct, pagecache
from benches.harness import Bench, Context, Needs, Outcome, Plot, Seconds, Size, Table, median, pairs, quantile
from benches.plain import PlainFile, write_plain
from benches.sessions import Array, arrays_for, bytes_of, pieces, random_tokens, touched
from kvstore import Layout, Namespace, Staging, Store, Stream
from kvstore.ids import TokenArray
from kvstore.kernel import default_threads

__all__ = ["BENCH"]

_PAGE = 4096
_PIECE = 8 << 20
_CHUNK = 8 << 20  # bytes of a staging buffer at least: as much as the library takes by default
_RAW = 256 << 20  # bytes that the ways of reading raw are tried with
_TRIES: dict[Size, int] = {"full": 3, "quick": 2, "smallest": 1}
# KiB a token: layers of K and V, bytes of a row
_LAYERS = {4: (2, 1024), 16: (8, 1024), 64: (32, 1024), 256: (64, 2048)}
# (tokens of sessions, KiB a token, most bytes of a session, pairs)
_SIZES: dict[Size, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    "full": ((1024, 8192, 32_768, 131_072), (4, 16, 64, 256), 2 << 30, 7),
    "quick": ((1024, 8192), (4, 16, 64), 256 << 20, 3),
    "smallest": ((512,), (4, 16), 16 << 20, 1),
}


@dataclass(frozen=True, slots=True)
class _Point:
    """A size of a session."""

    tokens: int
    kib: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.kib << 10

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.kib} KiB each"

    def layout(self) -> Layout:
        layers, row = _LAYERS[self.kib]
        streams = [Stream(f"{part}{layer}", "f16", (row // 512, 256)) for layer in range(layers) for part in "kv"]
        return Layout(streams=tuple(streams), model=f"bench-{self.kib}k")


def _points(size: Size) -> list[_Point]:
    tokens, kibs, most, _ = _SIZES[size]
    found = [_Point(count, kib) for kib in kibs for count in tokens]
    return [point for point in found if point.bytes <= most]


def _needs(size: Size) -> Needs:
    largest = max(point.bytes for point in _points(size))
    return Needs(disk=int(3.5 * largest) + (512 << 20), memory=4 * largest + (1 << 30))


def _cap(point: _Point) -> int:
    return point.bytes * 5 // 4 + (128 << 20)


class _Session:
    """One session of a size, saved in a store and written to a plain file; ways to bring it back."""

    def __init__(self, point: _Point, scratch: Path, threads: int) -> None:
        self.point, self._scratch, self.threads = point, scratch, threads
        self.layout = point.layout()
        self.prompt: TokenArray = random_tokens(point.tokens, point.tokens)
        self.source = arrays_for(self.layout, point.tokens, seed=point.kib)
        self.total = bytes_of(self.source)
        self.into = touched(self.layout, point.tokens)
        self.plain_path, self.store_path = scratch / "plain", scratch / "store"
        self.data = self.store_path / "data.mdb"
        write_plain(self.plain_path, self.source)
        with Store.open(self.store_path, max_bytes=_cap(point)) as store:
            store.namespace(self.layout).save(self.prompt, self.source)
        self.stayed: list[float] = []

    def save(self, place: int) -> dict[str, float]:
        """Seconds of saving it into a new store, and of writing it to a new file, durably in pieces."""
        sides: dict[str, Callable[[Path], float]] = {"plain": self._write, "kvstore": self._save}
        seconds: dict[str, float] = {}
        for name in sides if place % 2 == 0 else reversed(sides):
            directory = self._scratch / f"new-{name}"
            directory.mkdir()
            gc.collect()
            os.sync()
            seconds[name] = sides[name](directory)
            shutil.rmtree(directory)
        return seconds

    def _write(self, directory: Path) -> float:
        start = time.perf_counter()
        with (directory / "plain").open("wb", buffering=0) as file:
            for piece in pieces(self.source, _PIECE):
                for part in piece:
                    file.write(part)
                os.fdatasync(file.fileno())
        return time.perf_counter() - start

    def _save(self, directory: Path) -> float:
        with Store.open(directory, max_bytes=_cap(self.point)) as store:
            namespace = store.namespace(self.layout)
            start = time.perf_counter()
            namespace.save(self.prompt, self.source)
            return time.perf_counter() - start

    def warm_sides(self, namespace: Namespace, plain: PlainFile) -> dict[str, Callable[[], float | None]]:
        """Ways from the page cache, each with its lease, by name."""
        chunk = max(_CHUNK, -(-max(array.nbytes for array in self.source.values()) // _PAGE) * _PAGE)
        groups: list[list[Stream]] = [[]]
        for stream in self.layout.streams:
            if sum(self.source[s.name].nbytes for s in [*groups[-1], stream]) > chunk:
                groups.append([])
            groups[-1].append(stream)

        def views() -> None:
            with namespace.lease(self.prompt) as lease:
                self._whole(lease.length)
                found = [list(lease.views(stream.name)) for stream in self.layout.streams]
                del found

        def mapped(*, touch: bool) -> None:
            with namespace.lease(self.prompt) as lease:
                self._whole(lease.length)
                with lease.map() as buffer:
                    if touch:
                        buffer.array[::_PAGE].max()

        def copy() -> None:
            with namespace.lease(self.prompt) as lease:
                self._whole(lease.length)
                lease.copy_into(self.into, threads=self.threads)

        def staged() -> float:
            with Staging(2 * chunk, chunk_bytes=chunk) as staging:
                buffers = staging.take_many(2)
                for buffer in buffers:
                    buffer.array.fill(1)
                start = time.perf_counter()
                with namespace.lease(self.prompt) as lease:
                    self._whole(lease.length)
                    for n, group in enumerate(groups):
                        lease.copy_into(self._within(buffers[n % 2].array, group), threads=self.threads)
                seconds = time.perf_counter() - start
                for buffer in buffers:
                    staging.give(buffer)
            return seconds

        return {
            "memcpy": plain.copy,
            "pread": plain.read,
            "copy": copy,
            "staging": staged,
            "mapped": lambda: mapped(touch=False),
            "mapped and read": lambda: mapped(touch=True),
            "views": views,
        }

    def _within(self, buffer: Array, streams: list[Stream]) -> dict[str, Array]:
        """Arrays for some streams, one behind the other in a staging buffer."""
        arrays, at = {}, 0
        for stream in streams:
            size = self.source[stream.name].nbytes
            rows = buffer[at : at + size].view(stream.view_dtype)
            arrays[stream.name] = rows.reshape(stream.array_shape(self.point.tokens))
            at += size
        return arrays

    def cold_sides(self, way: direct.Way) -> dict[str, Callable[[], float | None]]:
        """Ways from the disk, by name. Each gives its seconds, without what drops the file from the cache before."""

        def restored(*, copied: bool) -> float:
            self.stayed.append(pagecache.drop(self.data))
            with Store.open(self.store_path) as store:
                namespace = store.namespace(self.layout)
                start = time.perf_counter()
                with namespace.lease(self.prompt) as lease:
                    self._whole(lease.length)
                    if copied:
                        lease.copy_into(self.into, threads=self.threads)
                    else:
                        with lease.map() as buffer:
                            buffer.array[::_PAGE].max()
                return time.perf_counter() - start

        return {
            "raw": lambda: direct.read_all(self.plain_path, way, self.total),
            "copy": lambda: restored(copied=True),
            "mapped and read": lambda: restored(copied=False),
        }

    def _whole(self, length: int) -> None:
        if length != self.point.tokens:
            raise AssertionError(f"{length} of {self.point.tokens} tokens are stored")

    def check(self, namespace: Namespace) -> None:
        """See that what is restored is what was saved."""
        with namespace.lease(self.prompt) as lease:
            lease.copy_into(self.into)
        if not all(np.array_equal(self.into[n].view(np.uint8), self.source[n].view(np.uint8)) for n in self.into):
            raise AssertionError(f"{self.point}: what was restored is not what was saved")

    def close(self) -> None:
        """Remove its files."""
        self.plain_path.unlink()
        shutil.rmtree(self.store_path)


def _measure(context: Context, point: _Point, threads: int, way: direct.Way | None) -> tuple[dict[str, Seconds], direct.Way, float]:
    """Seconds of all sides of a size; the way of raw reads; what share of a file stayed in the page cache when cold."""
    count = _SIZES[context.size][3]
    session = _Session(point, context.scratch, threads)
    try:
        saves = [session.save(place) for place in range(count)]
        context.say(f"{point}: saved {count} times")
        with ThreadPoolExecutor(threads) as pool, Store.open(session.store_path) as store:
            plain = PlainFile(session.plain_path, session.into, pool, threads)
            try:
                namespace = store.namespace(session.layout)
                session.check(namespace)
                sides = session.warm_sides(namespace, plain)
                for side in sides.values():  # every map has been in use
                    side()
                warm = pairs(context, f"{point}: warm", count, sides)
            finally:
                plain.close()
        if way is None or session.total <= _RAW:  # what is best for little is not what is best for much
            way, _ = direct.best_way(session.plain_path, min(session.total, _RAW), _TRIES[context.size], context.say)
        cold = pairs(context, f"{point}: cold", count, session.cold_sides(way))
    finally:
        session.close()
    return {"save": {name: [s[name] for s in saves] for name in saves[0]}, "warm": warm, "cold": cold}, way, max(session.stayed)


def _run(context: Context) -> Outcome:
    threads = default_threads()
    outcome = context.outcome
    outcome.figures |= {"threads": threads, "points": []}
    measured: list[tuple[_Point, dict[str, Seconds]]] = []
    ways: dict[str, str] = {}
    way: direct.Way | None = None
    stayed = 0.0
    points = _points(context.size)
    # the largest first: the ways of raw reads are tried with it
    for place, point in enumerate(sorted(points, key=lambda p: -p.bytes)):
        context.say(f"size {place + 1} of {len(points)}: {point}, {point.bytes / 1e6:.0f} MB")
        seconds, way, left = _measure(context, point, threads, way)
        ways[str(point)] = str(way)
        stayed = max(stayed, left)
        measured.append((point, seconds))
        outcome.figures["points"].append({"tokens": point.tokens, "kib": point.kib, "bytes": point.bytes, "seconds": seconds})
    measured.sort(key=lambda one: (one[0].kib, one[0].tokens))
    outcome.figures["raw_ways"] = ways
    if stayed > 0.01:
        outcome.doubts.append(f"{100 * stayed:.0f}% of a file stayed in the page cache: the cold figures are not cold")
    _describe(outcome, measured)
    return outcome


def _ratio(limit: list[float], own: list[float]) -> float:
    """Of the limit's speed, the median of the rounds."""
    return median([a / b for a, b in zip(limit, own, strict=True)])


def _describe(outcome: Outcome, measured: list[tuple[_Point, dict[str, Seconds]]]) -> None:
    warm_rows: list[tuple[Any, ...]] = []
    way_rows: list[tuple[Any, ...]] = []
    cold_rows: list[tuple[Any, ...]] = []
    save_rows: list[tuple[Any, ...]] = []
    plots: dict[str, dict[str, list[tuple[float, float]]]] = {"warm": {}, "cold": {}, "save": {}}
    for point, seconds in measured:
        warm, cold, save = seconds["warm"], seconds["cold"], seconds["save"]
        best = [min(times) for times in zip(warm["memcpy"], warm["pread"], strict=True)]
        size = (point.tokens, point.kib, point.bytes / 2**20)

        def speed(taken: list[float], total: int = point.bytes) -> float:
            return total / median(taken) / 1e9

        def ms(taken: list[float]) -> tuple[float, ...]:
            return tuple(quantile(taken, q) * 1e3 for q in (0.5, 0.9))

        ratios = [_ratio(best, warm["copy"]), _ratio(cold["raw"], cold["copy"]), _ratio(save["plain"], save["kvstore"])]
        warm_rows.append((*size, *ms(warm["copy"]), speed(warm["copy"]), speed(best), ratios[0]))
        way_rows.append(
            (
                *size,
                *(median(warm[name]) * 1e3 for name in ("views", "mapped", "mapped and read", "copy", "staging")),
                *(_ratio(best, warm[name]) for name in ("mapped and read", "staging")),
            )
        )
        mapped = _ratio(cold["raw"], cold["mapped and read"])
        cold_rows.append((*size, *ms(cold["copy"]), speed(cold["copy"]), speed(cold["raw"]), ratios[1], mapped))
        save_rows.append((*size, *ms(save["kvstore"]), speed(save["kvstore"]), speed(save["plain"]), ratios[2]))
        for name, taken in (("warm", warm["copy"]), ("cold", cold["copy"]), ("save", save["kvstore"])):
            plots[name].setdefault(f"{point.kib} KiB a token", []).append((point.tokens, speed(taken)))
        outcome.lines.append(
            f"{point!s:28} warm {speed(warm['copy']):6.2f} GB/s, {ratios[0]:.2f} of plain; cold {speed(cold['copy']):5.2f}, "
            f"{ratios[1]:.2f} of raw; save {speed(save['kvstore']):5.2f}, {ratios[2]:.2f} of plain; mapped "
            f"{median(warm['mapped']) * 1e3:.2f} ms"
        )
    size_heads = ("tokens", "KiB a token", "MiB")
    outcome.tables = [
        Table(
            "Restored from the page cache into arrays, every byte checked",
            (*size_heads, "ms, p50", "p90", "GB/s", "best plain copy, GB/s", "of the best plain copy"),
            tuple(warm_rows),
            "The best plain copy of each round: memcpy out of a map that is in use, or reads, of a plain file with the same bytes.",
        ),
        Table(
            "From the page cache in every way, ms, the lease included",
            (
                *size_heads,
                "views",
                "mapped",
                "mapped and read",
                "copied into arrays",
                "staged",
                "mapped and read, of the best plain copy's speed",
                "staged, of the best plain copy's speed",
            ),
            tuple(way_rows),
            "Views and maps check headers only and copy nothing; read is a byte of every 4 KiB page. " + _staging_note(),
        ),
        Table(
            "Restored from the disk into arrays, every byte checked",
            (*size_heads, "ms, p50", "p90", "GB/s", "raw reads, GB/s", "of raw reads", "mapped and read, of raw reads"),
            tuple(cold_rows),
            "Raw reads of a plain file with the same bytes, past the page cache, in the size and depth that are best for so many "
            "bytes.",
        ),
        Table(
            "Saved durably into a new store",
            (*size_heads, "ms, p50", "p90", "GB/s", "plain writes, GB/s", "of plain writes"),
            tuple(save_rows),
            "Plain writes of the same bytes to a new file, fdatasync every 8 MiB.",
        ),
    ]
    titles = {"warm": "Restored from the page cache", "cold": "Restored from the disk", "save": "Saved durably"}
    outcome.plots = [Plot(name, title, "tokens", "GB/s", plots[name], log_x=True) for name, title in titles.items()]


def _staging_note() -> str:
    with Staging(1 << 20, chunk_bytes=_PAGE) as staging:
        device = staging.device is not None
    host = "Staged is the host's half of a copy to a device: a few streams after the other into one of two staging buffers, checked"
    return host + (
        ", and pinned; nothing is sent to the device here."
        if device
        else ". There is no CUDA driver on this machine: the buffers are not pinned, and nothing goes to a device."
    )


BENCH = Bench(
    "sizes",
    "sessions of 1,000 to 128,000 tokens at 4 to 256 KiB a token, saved and restored, warm and cold, in every way",
    _needs,
    _run,
    "Sizes of more than 2 GiB are left out. For each size the sides take turns, every other round in reverse order, with as many "
    "threads as the library takes by default. Saves go to a new store each time, plain writes to a new file. Cold is after "
    "dropping the file from the page cache, in a store opened anew.",
)
