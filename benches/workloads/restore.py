"""restore: a long session from the page cache into arrays, validated, against the best plain copy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benches import pagecache
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Target, median, pairs
from benches.plain import PlainFile, write_plain
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, Array, arrays_for, bytes_of, large_layout, random_tokens, touched
from kvstore import Layout, Namespace, Store

__all__ = ["BENCH"]

_THREADS = 2
_LIMIT = 0.95
# (tokens, pairs)
_SIZES: dict[Size, tuple[int, int]] = {"full": (100_000, 9), "quick": (20_000, 7), "smallest": (1500, 2)}


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=3 * total + (256 << 20), memory=3 * total + (1 << 30))


class _Stored:
    """The candidate: a store, opened anew where its map is to be a fresh one."""

    def __init__(self, path: Path, cap: int, layout: Layout, prompt: npt.NDArray[np.uint32]) -> None:
        self._path, self._cap, self._layout, self._prompt = path, cap, layout, prompt
        self.opened: list[float] = []
        self.leased: list[float] = []
        self.open()

    def open(self) -> None:
        """Open the store, and so map its file anew."""
        start = time.perf_counter()
        self.store = Store.open(self._path, max_bytes=self._cap)
        self.namespace: Namespace = self.store.namespace(self._layout)
        self.opened.append(time.perf_counter() - start)

    def map_anew(self) -> None:
        self.store.close()
        self.open()

    def close(self) -> None:
        self.store.close()

    def restore(self, into: dict[str, Array]) -> None:
        start = time.perf_counter()
        with self.namespace.lease(self._prompt) as lease:
            self.leased.append(time.perf_counter() - start)
            if lease.length != self._prompt.size:
                raise AssertionError(f"a lease of {lease.length} tokens, expected {self._prompt.size}")
            lease.copy_into(into, threads=_THREADS)

    def views(self) -> dict[str, float]:
        """Milliseconds of a lease, of one view for each block, and of one for each stream of each block."""
        start = time.perf_counter()
        with self.namespace.lease(self._prompt) as lease:
            leased = time.perf_counter()
            payloads = [block.payload for block in lease.blocks]
            viewed = time.perf_counter()
            streams = [list(lease.views(stream.name)) for stream in self._layout.streams]
            end = time.perf_counter()
            count = sum(len(s) for s in streams)
            blocks = len(payloads)
            del payloads, streams
        return {
            "blocks": blocks,
            "stream_views": count,
            "lease_ms": (leased - start) * 1e3,
            "block_views_ms": (viewed - leased) * 1e3,
            "stream_views_ms": (end - viewed) * 1e3,
        }


def _compare(outcome: Outcome, name: str, total: int, seconds: dict[str, list[float]]) -> float:
    """Note the sides of some rounds; return the median of the ratios to the better plain copy of each."""
    plain = [min(times) for times in zip(seconds["memcpy"], seconds["pread"], strict=True)]
    ratio = median([p / k for p, k in zip(plain, seconds["kvstore"], strict=True)])
    speed = {side: total / median(s) / 1e9 for side, s in seconds.items()}
    outcome.figures[name] = {"pairs": len(plain), "gb_s": speed, "ratio": ratio, "seconds": seconds}
    outcome.lines.append(
        f"{name:12} memcpy from the map {speed['memcpy']:6.2f} GB/s, pread {speed['pread']:6.2f} GB/s, "
        f"kvstore {speed['kvstore']:6.2f} GB/s, {ratio:.3f} of the better one of each round"
    )
    return ratio


def _tables(outcome: Outcome, total: int) -> None:
    """Fill what the report shows."""
    figures = outcome.figures
    cases = {"warm": "maps in use", "warm_fresh": "maps made anew"}
    outcome.tables = [
        Table(
            f"{total / 1e9:.2f} GB from the page cache into arrays",
            (
                "",
                "memcpy from a map, GB/s",
                "pread, GB/s",
                "kvstore, checked, GB/s",
                "ratio to the better plain copy of each round",
            ),
            tuple(
                (text, *(figures[case]["gb_s"][side] for side in ("memcpy", "pread", "kvstore")), figures[case]["ratio"])
                for case, text in cases.items()
            ),
            f"{_THREADS} threads on each side. Memory at most {figures['peak_mib']:.1f} MiB above the arrays.",
        ),
        Table(
            "What comes before the first byte",
            ("", "ms", "ratio to the restore"),
            tuple(
                (what, ms, ms / (median(figures["warm"]["seconds"]["kvstore"]) * 1e3))
                for what, ms in (
                    ("opening the store", figures["lease"]["open_ms"]),
                    ("the lease", figures["lease"]["restore_lease_ms"]),
                    (f"{figures['lease']['blocks']} block views", figures["lease"]["block_views_ms"]),
                    (f"{figures['lease']['stream_views']} stream views", figures["lease"]["stream_views_ms"]),
                )
            ),
        ),
    ]
    outcome.plots = [
        Plot(
            "rounds",
            "Warm restore, round by round",
            "round",
            "GB/s",
            {
                side: [(place + 1, total / taken / 1e9) for place, taken in enumerate(figures["warm"]["seconds"][side])]
                for side in ("memcpy", "pread", "kvstore")
            },
        )
    ]


def _run(context: Context) -> Outcome:
    tokens, count = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(5, tokens)
    plain_file, store_dir = context.scratch / "plain", context.scratch / "store"
    cap = 2 * tokens * TOKEN_BYTES + (256 << 20)
    outcome = context.outcome

    context.say(f"saving {tokens * TOKEN_BYTES / 1e9:.2f} GB, and writing them to a plain file")
    source = arrays_for(layout, tokens)
    total = bytes_of(source)
    write_plain(plain_file, source)
    with Store.open(store_dir, max_bytes=cap) as store:
        store.namespace(layout).save(prompt, source)
    del source
    data = store_dir / "data.mdb"
    into = touched(layout, tokens)
    with ThreadPoolExecutor(_THREADS) as pool:
        plain = PlainFile(plain_file, into, pool, _THREADS)
        stored = _Stored(store_dir, cap, layout, prompt)
        try:
            stored.restore(into)
            if not plain.same():
                raise AssertionError("what was restored is not what was saved")
            plain.copy()
            in_cache = min(pagecache.resident(plain_file), pagecache.resident(data))
            if in_cache < 0.98:
                outcome.doubts.append(f"only {100 * in_cache:.1f}% of a file are in the page cache")
            sides = {"memcpy": plain.copy, "pread": plain.read, "kvstore": lambda: stored.restore(into)}

            warm = pairs(context, "warm, maps in use", count, sides)
            ratio = _compare(outcome, "warm", total, warm)
            fresh = pairs(
                context,
                "warm, maps made anew",
                count,
                {
                    "memcpy": lambda: _anew(plain, plain.copy),
                    "pread": plain.read,
                    "kvstore": lambda: _anew(stored, lambda: stored.restore(into)),
                },
            )
            first = _compare(outcome, "warm_fresh", total, fresh)
            views = stored.views()
            lease_ms, open_ms = median(stored.leased) * 1e3, median(stored.opened) * 1e3
            outcome.figures["lease"] = {**views, "restore_lease_ms": lease_ms, "open_ms": open_ms}
            outcome.lines.append(
                f"lease        {lease_ms:.2f} ms; {views['blocks']} block views {views['block_views_ms']:.2f} ms, "
                f"{views['stream_views']} stream views {views['stream_views_ms']:.2f} ms; opening the store {open_ms:.1f} ms"
            )
            with Watch() as watch:
                stored.restore(into)
            outcome.figures["peak_mib"] = watch.above_mib
            outcome.lines.append(f"memory       at most {watch.above_mib:.1f} MiB above the arrays")
        finally:
            plain.close()
            stored.close()
    outcome.figures["bytes"] = total
    outcome.figures["threads"] = _THREADS
    _tables(outcome, total)
    outcome.targets = [
        Target("warm, maps in use: speed over that of the best plain copy", ratio, _LIMIT, at_most=False),
        Target("warm, maps made anew: speed over that of the best plain copy", first, _LIMIT, at_most=False),
    ]
    return outcome


def _anew(side: PlainFile | _Stored, work: Callable[[], None]) -> float:
    """Let a side map its file anew, then time its work."""
    side.map_anew()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


_METHOD = """\
A session of 100,000 tokens of 16 KiB (16 streams) is saved, and its bytes are written to a plain file; both are in the page
cache, which is checked with mincore. Three sides take turns, with two threads each, into the same arrays, every page of which was
touched before: a lease and `copy_into`, which checks every byte; `memcpy` from a map of the plain file, each array cut evenly
among the threads; `preadv` of 1 MiB into the arrays. A ratio is to the better plain copy of the same round. "Maps made anew" lets
the store be opened, and the plain file be mapped, right before each round, so that page tables are empty."""

_BEHIND = """\
On processors without AVX-512, where two threads compute the sums not much faster than the memory copies (`limits` has both
speeds): as long as it waits for the memory the sums cost nothing, and the faster that is, the more of them shows. What was tried
for it is told in [architecture.md](architecture.md#the-kernel)."""

BENCH = Bench(
    "restore", "1.6 GB from the page cache into arrays, validated, against the best plain copy", _needs, _run, _METHOD, _BEHIND
)
