"""lease: a lease on a long session with a view of each block, against reading the same bytes; and what it takes cold."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benches import pagecache
from benches.harness import Bench, Context, Needs, Outcome, Size, Table, Target, median, pairs, quantile
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, arrays_for, large_layout, random_tokens
from kvstore import Namespace, Store
from kvstore.kernel import read_headers
from kvstore.records.block import BlockHeader, header_bytes

__all__ = ["BENCH"]

_THREADS = 2
_LIMIT_MS, _LIMIT_RATIO = 2.0, 100.0
# (tokens, rounds, leases a round, cold rounds)
_SIZES: dict[Size, tuple[int, int, int, int]] = {
    "full": (100_000, 9, 100, 7),
    "quick": (20_000, 7, 100, 7),
    "smallest": (1500, 2, 5, 2),
}

Prompt = npt.NDArray[np.uint32]


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=2 * total + (256 << 20), memory=3 * total + (1 << 30))


def _open(namespace: Namespace, prompt: Prompt) -> float:
    """Seconds of a lease with a view of each block; the time to end it is not counted."""
    start = time.perf_counter()
    with namespace.lease(prompt) as lease:
        payloads = [block.payload for block in lease.blocks]
        seconds = time.perf_counter() - start
        if lease.length != prompt.size or len(payloads) != -(-prompt.size // namespace.layout.block_tokens):
            raise AssertionError(f"{len(payloads)} blocks of {lease.length} tokens, expected all of {prompt.size}")
    return seconds


class _Copy:
    """The baseline: what the views show, copied plainly into memory that was touched before."""

    def __init__(self, namespace: Namespace, prompt: Prompt, pool: ThreadPoolExecutor) -> None:
        self._namespace, self._prompt, self._pool = namespace, prompt, pool
        with namespace.lease(prompt) as lease:
            self.bytes = sum(block.payload_bytes for block in lease.blocks)
        self._into = np.ones(self.bytes, np.uint8)

    def __call__(self) -> float:
        with self._namespace.lease(self._prompt) as lease:
            payloads = [block.payload for block in lease.blocks]
            starts = np.cumsum([0] + [payload.size for payload in payloads]).tolist()

            def copy(part: int) -> None:
                for index in range(part, len(payloads), _THREADS):
                    np.copyto(self._into[starts[index] : starts[index + 1]], payloads[index])

            start = time.perf_counter()
            for _ in self._pool.map(copy, range(_THREADS)):
                pass
            return time.perf_counter() - start


def _warm(context: Context, namespace: Namespace, prompt: Prompt, outcome: Outcome) -> None:
    _, rounds, leases, _ = _SIZES[context.size]
    every: list[float] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        copy = _Copy(namespace, prompt, pool)

        def lease() -> float:
            seconds = [_open(namespace, prompt) for _ in range(leases)]
            every.extend(seconds)
            return median(seconds)

        copy()
        lease()
        every.clear()
        seconds = pairs(context, "warm", rounds, {"copy": copy, "lease": lease})
    with Watch() as watch:
        for _ in range(leases):
            _open(namespace, prompt)
    ratio = median([c / k for c, k in zip(seconds["copy"], seconds["lease"], strict=True)])
    half, most, copied = median(every) * 1e3, quantile(every, 0.99) * 1e3, median(seconds["copy"]) * 1e3
    outcome.tables.append(
        Table(
            f"Warm: a lease with a view of each block, of {copy.bytes / 1e9:.2f} GB",
            ("", "median, ms", "p90, ms", "p99, ms", "ratio of copying to it"),
            (
                (f"lease with views, {len(every)} times", half, quantile(every, 0.9) * 1e3, most, ratio),
                (f"copying the same bytes, {_THREADS} threads", copied, quantile(seconds["copy"], 0.9) * 1e3, None, 1.0),
            ),
            f"{watch.above_mib:.1f} MiB of memory for {leases} leases one after another.",
        )
    )
    outcome.figures["warm"] = {
        "leases": len(every),
        "median_ms": half,
        "p99_ms": most,
        "copy_ms": copied,
        "copy_gb_s": copy.bytes / copied / 1e6,
        "threads": _THREADS,
        "ratio": ratio,
        "above_mib": watch.above_mib,
        "seconds": seconds,
    }
    outcome.lines.append(
        f"warm  median {half:.2f} ms, p99 {most:.2f} ms, {watch.above_mib:.1f} MiB of memory; copying the same bytes "
        f"{copied:.0f} ms: {ratio:.0f} times as long"
    )
    outcome.targets += [
        Target("a lease with a view of each block: ms", half, _LIMIT_MS),
        Target("reading the same bytes: times as long", ratio, _LIMIT_RATIO, at_most=False),
    ]


@dataclass(frozen=True, slots=True)
class _Headers:
    """Where the headers of the session lie, and what they begin with."""

    offsets: npt.NDArray[np.int64]
    heads: npt.NDArray[np.void]
    sums: int

    @classmethod
    def of(cls, namespace: Namespace, prompt: Prompt, data: Path) -> _Headers:
        sums = len(namespace.layout.streams)
        with namespace.lease(prompt) as lease:
            places = [block.file_offset - header_bytes(sums) for block in lease.blocks]
        length = BlockHeader.encoded_bytes(sums) - 4 * sums - 4
        with data.open("rb") as file:
            raw = b"".join(os.pread(file.fileno(), length, place) for place in places)
        return cls(np.array(places, np.int64), np.frombuffer(raw, f"V{length}"), sums)


def _cold(context: Context, directory: Path, prompt: Prompt, headers: _Headers, outcome: Outcome) -> None:
    data = directory / "data.mdb"
    stayed: list[float] = []
    length = BlockHeader.encoded_bytes(headers.sums)

    def lease() -> float:
        with Store.open(directory) as store:  # opening reads the whole index, and with it the page of each header
            namespace = store.namespace(large_layout())
            stayed.append(pagecache.drop(data))
            return _open(namespace, prompt)

    def at_once() -> float:
        stayed.append(pagecache.drop(data))
        with data.open("rb", buffering=0) as file:
            start = time.perf_counter()
            _, status = read_headers(file.fileno(), headers.offsets, headers.heads, headers.sums)
            seconds = time.perf_counter() - start
        if status.any():
            raise AssertionError("a header did not pass its checks")
        return seconds

    def one_by_one() -> float:
        stayed.append(pagecache.drop(data))
        with data.open("rb", buffering=0) as file:
            start = time.perf_counter()
            for offset in headers.offsets.tolist():
                os.pread(file.fileno(), length, offset)
            return time.perf_counter() - start

    sides = {"lease": lease, "at_once": at_once, "one_by_one": one_by_one}
    seconds = pairs(context, "cold", _SIZES[context.size][3], sides)
    ms = {name: median(values) * 1e3 for name, values in seconds.items()}
    outcome.figures["cold"] = {f"{name}_ms": value for name, value in ms.items()}
    outcome.figures["cold"] |= {"resident_after_drop": max(stayed), "seconds": seconds}
    outcome.lines.append(
        f"cold  lease with views {ms['lease']:.1f} ms; of it the {headers.offsets.size} headers, at once {ms['at_once']:.1f} ms, "
        f"one after another they take {ms['one_by_one']:.1f} ms"
    )
    outcome.tables.append(
        Table(
            "Cold: nothing of the file in the page cache",
            ("", "median, ms", "ratio to the headers at once"),
            (
                ("lease with views, index and headers", ms["lease"], ms["lease"] / ms["at_once"]),
                (f"of it {headers.offsets.size} headers, all asked for at once", ms["at_once"], 1.0),
                ("one header after another by pread", ms["one_by_one"], ms["one_by_one"] / ms["at_once"]),
            ),
        )
    )
    if max(stayed) > 0.01:
        outcome.doubts.append(f"{100 * max(stayed):.0f}% of the file stayed in the page cache: the cold figures are not cold")


def _run(context: Context) -> Outcome:
    tokens = _SIZES[context.size][0]
    layout, prompt, directory = large_layout(), random_tokens(7, tokens), context.scratch / "store"
    outcome = context.outcome
    context.say(f"saving {tokens * TOKEN_BYTES / 1e9:.2f} GB")
    with Store.open(directory, max_bytes=2 * tokens * TOKEN_BYTES + (256 << 20)) as store:
        namespace = store.namespace(layout)
        namespace.save(prompt, arrays_for(layout, tokens))
        _warm(context, namespace, prompt, outcome)
        headers = _Headers.of(namespace, prompt, directory / "data.mdb")
    _cold(context, directory, prompt, headers, outcome)
    outcome.figures["blocks"] = int(headers.offsets.size)
    return outcome


_METHOD = """\
A lease finds 100,000 tokens of 16 KiB and pins them; with it comes a read-only view of each block. What it saves is a copy of the
same bytes: by two threads, plainly, from the views into memory that was touched before. Both take turns; the time to end a lease
is not counted. Cold: the file is dropped from the page cache and the store opened anew, then a lease; beside it, reading the
blocks' headers alone, all at once as a lease does it and one after another."""

_BEHIND = """\
A lease is the work of one thread, most of it in Python: for each block a lookup in the index, a read of its header with the check
of that, and a view. So it takes as long as that thread needs for so many blocks, and a processor with a lower clock, or whose
caches the copies in between have emptied, needs longer; the copy beside it has the memory of the whole machine."""

BENCH = Bench(
    "lease",
    "a lease on 100,000 tokens with a view of each block, against reading the same 1.6 GB; and cold",
    _needs,
    _run,
    _METHOD,
    _BEHIND,
)
