"""mapped: a long session from the page cache as one run of memory, not copied, against copying it into arrays."""

from __future__ import annotations

import time

import numpy as np

from benches.harness import Bench, Context, Needs, Outcome, Size, Table, Target, median, pairs
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, Array, arrays_for, bytes_of, large_layout, random_tokens
from kvstore import Mapped, Namespace, Store
from kvstore.ids import TokenArray

__all__ = ["BENCH"]

_THREADS = 2
_PAGE = 4096
# MiB: the last block is copied, and in one more buffer meanwhile
_LIMIT_MIB = 16
# (tokens, pairs)
_SIZES: dict[Size, tuple[int, int]] = {"full": (100_000, 9), "quick": (20_000, 7), "smallest": (1500, 2)}


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=2 * total + (256 << 20), memory=3 * total + (1 << 30))


def _touch(buffer: Mapped) -> int:
    """Read a byte of each page of a buffer."""
    return int(buffer.array[::_PAGE].sum())


def _map(namespace: Namespace, prompt: TokenArray) -> Mapped:
    with namespace.lease(prompt) as lease:
        if lease.length != prompt.size:
            raise AssertionError(f"a lease of {lease.length} tokens, expected {prompt.size}")
        return lease.map()


def _same(buffer: Mapped, source: dict[str, Array], size: int) -> bool:
    """Whether a buffer's streams hold the rows of some arrays, in blocks of `size`."""
    return all(
        np.array_equal(buffer.stream(name, index).view(np.uint8), rows[index * size : (index + 1) * size].view(np.uint8))
        for name, rows in source.items()
        for index in range(buffer.blocks)
    )


def _run(context: Context) -> Outcome:
    tokens, count = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(6, tokens)
    outcome = context.outcome
    context.say(f"saving {tokens * TOKEN_BYTES / 1e9:.2f} GB")
    arrays = arrays_for(layout, tokens)
    total = bytes_of(arrays)
    with Store.open(context.scratch / "store", max_bytes=2 * tokens * TOKEN_BYTES + (256 << 20)) as store:
        namespace = store.namespace(layout)
        namespace.save(prompt, arrays)
        with _map(namespace, prompt) as buffer:
            if not _same(buffer, arrays, layout.block_tokens):
                raise AssertionError("what was mapped is not what was saved")
            blocks, mapped_bytes = buffer.blocks, buffer.blocks * buffer.stride

        parts: dict[str, list[float]] = {name: [] for name in ("map", "touch", "again", "unmap")}

        def mapped() -> float:
            times = [time.perf_counter()]
            buffer = _map(namespace, prompt)
            times.append(time.perf_counter())
            for _ in range(2):
                _touch(buffer)
                times.append(time.perf_counter())
            buffer.close()
            times.append(time.perf_counter())
            for name, start, end in zip(parts, times, times[1:], strict=False):
                parts[name].append(end - start)
            return times[2] - times[0]

        def copied() -> None:
            with namespace.lease(prompt) as lease:
                lease.copy_into(arrays, threads=_THREADS)

        def detached() -> float:
            buffer = _map(namespace, prompt)
            start = time.perf_counter()
            buffer.detach(threads=_THREADS)
            return time.perf_counter() - start

        sides = {"map and touch": mapped, "copy, checked": copied, "detach": detached}
        seconds = pairs(context, "mapped and copied in turns", count, sides)
        with Watch() as mapping:
            buffer = _map(namespace, prompt)
            _touch(buffer)
        with Watch() as detaching:
            buffer.detach(threads=_THREADS)
        buffer.close()
    milliseconds = {name: median(values) * 1e3 for name, values in {**parts, **seconds}.items()}
    ratio = median([c / m for c, m in zip(seconds["copy, checked"], seconds["map and touch"], strict=True)])
    outcome.figures = {
        "bytes": total,
        "blocks": blocks,
        "threads": _THREADS,
        "ms": milliseconds,
        "copy_over_map_and_touch": ratio,
        "mapping_above_mib": mapping.above_mib,
        "detaching_above_mib": detaching.above_mib,
        "seconds": {**parts, **seconds},
    }
    ms = milliseconds
    outcome.lines = [
        f"lease and map  {ms['map']:7.2f} ms for {blocks} blocks, {mapped_bytes / 1e9:.2f} GB; unmapping {ms['unmap']:.2f} ms",
        f"first touch    {ms['touch']:7.2f} ms, a byte of each page by one thread; once more {ms['again']:.2f} ms",
        f"copying        {ms['copy, checked']:7.2f} ms into arrays, checked, {_THREADS} threads: {ratio:.2f} times as long as both",
        f"detach         {ms['detach']:7.2f} ms to fresh memory, {_THREADS} threads",
        f"RssAnon        {mapping.above_mib:.1f} MiB more with all mapped and touched, {detaching.above_mib:.1f} MiB once detached",
    ]
    says = {
        "map": f"lease and map of {blocks} blocks",
        "touch": "touching a byte of each page, one thread",
        "again": "touching them once more",
        "map and touch": "lease, map and first touch together",
        "copy, checked": f"a checked copy into arrays, {_THREADS} threads",
        "detach": f"detaching: a private copy in its place, {_THREADS} threads",
        "unmap": "unmapping",
    }
    outcome.tables = [
        Table(
            f"{mapped_bytes / 1e9:.2f} GB as one run of memory",
            ("", "ms", "ratio to the copy"),
            tuple((text, ms[part], ms[part] / ms["copy, checked"]) for part, text in says.items()),
            f"Its own memory: {mapping.above_mib:.1f} MiB with all mapped and touched, {detaching.above_mib:.1f} once detached.",
        )
    ]
    outcome.targets = [Target("MiB of its own memory that mapping and touching takes", mapping.above_mib, _LIMIT_MIB)]
    return outcome


_METHOD = """\
`lease.map()` makes one run of memory of the blocks' own file pages: nothing is copied, only headers are checked, and the pages
cost time when they are touched first. In turns with a checked copy into arrays and with `detach()`. Every figure includes the
lease where the side needs one."""

BENCH = Bench("mapped", "1.6 GB from the page cache as one run of memory, not copied, against copying", _needs, _run, _METHOD)
