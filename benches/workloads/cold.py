"""cold: a long session that the page cache has nothing of, into arrays, validated, against raw reads and against a cold map."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benches import direct, pagecache
from benches.harness import Bench, Cell, Context, Needs, Outcome, Plot, Size, Table, Target, median, pairs
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, Array, arrays_for, bytes_of, large_layout, pieces, random_tokens
from kvstore import Layout, Store

__all__ = ["BENCH"]

_THREADS = 2
_PAGE = 4096
_FAST = 3e9  # bytes a second, from which on a device is one that a map can't keep up with
# tokens, rounds of all raw ways, pairs
_SIZES: dict[Size, tuple[int, int, int]] = {"full": (100_000, 3, 7), "quick": (20_000, 2, 5), "smallest": (1500, 1, 1)}


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=int(2.4 * total) + (256 << 20), memory=3 * total + (1 << 30))


def _two_views(layout: Layout, tokens: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Arrays for every stream, touched, that begin a little behind the start of a page; and others, in the same memory, at it."""
    beside: dict[str, Array] = {}
    aligned: dict[str, Array] = {}
    for stream in layout.streams:
        length = stream.rows(tokens) * stream.row_bytes
        memory = np.ones(length + 2 * _PAGE, np.uint8)
        start = -memory.__array_interface__["data"][0] % _PAGE
        for views, at in ((beside, start + 64), (aligned, start)):
            views[stream.name] = memory[at : at + length].view(stream.view_dtype).reshape(stream.array_shape(tokens))
    return beside, aligned


def _run(context: Context) -> Outcome:
    tokens, rounds, count = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(5, tokens)
    plain_file, store_dir = context.scratch / "plain", context.scratch / "store"
    data = store_dir / "data.mdb"
    outcome = context.outcome

    context.say(f"saving {tokens * TOKEN_BYTES / 1e9:.2f} GB, and writing them to a plain file")
    source = arrays_for(layout, tokens)
    total = bytes_of(source)
    with plain_file.open("wb", buffering=0) as file:
        for piece in pieces(source, 8 << 20):
            for part in piece:
                file.write(part)
    with Store.open(store_dir, max_bytes=int(1.2 * total) + (256 << 20)) as store:
        store.namespace(layout).save(prompt, source)
    into, aligned = _two_views(layout, tokens)
    stayed: list[float] = []
    peaks: list[float] = []  # the first ones too: a process keeps what it reads into

    def restored(arrays: dict[str, Array], *, again: bool = False) -> float:
        """Seconds of a lease and a copy, in a store opened anew; `again`: of blocks that it has restored before."""
        stayed.append(pagecache.drop(data))
        with Store.open(store_dir) as store:
            namespace = store.namespace(layout)
            if again:
                with namespace.lease(prompt) as lease:
                    lease.copy_into(arrays, threads=_THREADS)
                stayed.append(pagecache.drop(data))
            with Watch() as watch:
                start = time.perf_counter()
                with namespace.lease(prompt) as lease:
                    lease.copy_into(arrays, threads=_THREADS)
                seconds = time.perf_counter() - start
            if lease.length != tokens:
                raise AssertionError(f"restored {lease.length} tokens of {tokens}")
        peaks.append(watch.above_mib)
        return seconds

    def mapped() -> float:
        """Seconds of copying a plain file's cold map, read-ahead as the system does it, with as many threads."""
        stayed.append(pagecache.drop(plain_file))
        view = np.memmap(plain_file, np.uint8, mode="r")
        start = time.perf_counter()
        at, work = 0, []
        for array in into.values():
            flat = array.reshape(-1).view(np.uint8)
            step = -(-flat.size // _THREADS)
            work += [(flat[s : s + step], view[at + s : at + min(s + step, flat.size)]) for s in range(0, flat.size, step)]
            at += flat.size
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda pair: np.copyto(pair[0], pair[1]), work):
                pass
        seconds = time.perf_counter() - start
        del view, work
        return seconds

    for arrays in (into, aligned):
        restored(arrays)
        if not all(np.array_equal(arrays[name].view(np.uint8), source[name].view(np.uint8)) for name in arrays):
            raise AssertionError("what was restored is not what was saved")
    del source
    way, ways = direct.best_way(data, total, rounds, context.say)
    sides = {
        "kvstore": lambda: restored(into),
        "in_place": lambda: restored(aligned),
        "raw": lambda: direct.read_all(data, way, total),
        "map": mapped,
        "second": lambda: restored(into, again=True),
    }
    seconds = pairs(context, "cold", count, sides)
    speed = {side: total / median(taken) / 1e9 for side, taken in seconds.items()}

    def ratio(side: str, to: str = "kvstore") -> float:
        return median([other / own for other, own in zip(seconds[side], seconds[to], strict=True)])

    outcome.figures = {
        "bytes": total,
        "threads": _THREADS,
        "pairs": count,
        "gb_s": speed,
        "ratio_to_raw": ratio("raw"),
        "ratio_to_map": ratio("map"),
        "in_place_ratio_to_raw": ratio("raw", "in_place"),
        "raw_way": str(way),
        "raw_ways_seconds": ways,
        "peak_mib": max(peaks),
        "seconds": seconds,
        "resident_after_drop": max(stayed),
    }
    outcome.lines = [
        f"raw O_DIRECT, {way} (the best of {len(ways)} ways) {speed['raw']:.2f} GB/s, a cold map {speed['map']:.2f} GB/s",
        f"kvstore {speed['kvstore']:.2f} GB/s, {ratio('raw'):.3f} of raw, {ratio('map'):.3f} of the map; into arrays from the "
        f"start of a page on {speed['in_place']:.2f} GB/s, {ratio('raw', 'in_place'):.3f} of raw",
        f"what is restored a second time, through the page cache, {speed['second']:.2f} GB/s",
        f"memory: at most {max(peaks):.1f} MiB above the arrays",
    ]
    if max(stayed) > 0.01:
        outcome.doubts.append(f"{100 * max(stayed):.0f}% of a file stayed in the page cache: these figures are not cold")
    least = 1.5 if total / median(seconds["raw"]) > _FAST else 1.0
    outcome.targets = [
        Target("cold: speed over that of raw direct reads", ratio("raw"), 0.9, at_most=False),
        Target("cold: speed over that of a cold map", ratio("map"), least, at_most=False),
    ]
    says = {
        "kvstore": "kvstore, a lease and a checked copy",
        "in_place": "the same into arrays from the start of a page on, read to where the rows belong",
        "second": "the same of blocks that the process restored before, through the page cache",
        "raw": f"raw direct reads, the best of {len(ways)} ways: {way}",
        "map": "copying from a cold map, read-ahead as the system does it",
    }
    outcome.tables = [
        Table(
            f"{total / 1e9:.2f} GB that the page cache has nothing of",
            ("", "GB/s", "ratio to raw reads", "ratio to the cold map"),
            tuple((text, speed[side], ratio("raw", side), ratio("map", side)) for side, text in says.items()),
            f"Memory at most {max(peaks):.1f} MiB above the arrays.",
        ),
        _ways_table(ways, total),
    ]
    outcome.plots = [
        Plot(
            "rounds",
            "Cold restore, round by round",
            "round",
            "GB/s",
            {
                name: [(place + 1, total / taken / 1e9) for place, taken in enumerate(seconds[side])]
                for side, name in (("kvstore", "kvstore"), ("raw", "raw direct reads"), ("map", "cold map"))
            },
        )
    ]
    return outcome


def _ways_table(ways: dict[str, list[float]], total: int) -> Table:
    """What the raw reads gave, size by size; `ways` has them by what a `Way` is called."""
    speeds = {name: total / median(taken) / 1e9 for name, taken in ways.items()}
    rows: list[tuple[Cell, ...]] = []
    for size in direct.SIZES:
        for huge in (False, True):
            found = [speeds[str(direct.Way(size, depth, huge))] for depth in direct.DEPTHS]
            pages = "huge pages" if huge else "ordinary pages"
            rows.append((f"{size >> 10} KiB", pages, *found, max(found) / max(speeds.values())))
    return Table(
        "Raw direct reads: what was tried to find the best way",
        ("a read", "into", *(f"{depth} at once, GB/s" for depth in direct.DEPTHS), "ratio of its best to the best"),
        tuple(rows),
        "A few times each, in turns, before the rounds of the table above.",
    )


_METHOD = """\
A session of 100,000 tokens of 16 KiB is saved, and written to a plain file too. Before each round the file is dropped from the
page cache (fdatasync, then posix_fadvise); mincore says how much stayed, and more than 1% is a doubt. The store is opened anew
each time, and the time counts from the lease on. Against it: reads of the same file with O_DIRECT, by the fastest of all
combinations of 256 KiB, 1 and 4 MiB, 1 to 8 at once, into ordinary and huge pages; and copying from a cold map of the plain file
with two threads, with the system's read-ahead. What decides the speed of a cold read is told in
[architecture.md](architecture.md#what-decides-the-speed-of-a-cold-read)."""

BENCH = Bench(
    "cold",
    "1.6 GB from the disk into arrays, validated, against raw direct reads and against a cold map",
    _needs,
    _run,
    _METHOD,
)
