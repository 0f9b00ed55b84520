"""trace: an hour of requests replayed against a store that holds a part of them, against the best that its cap allows."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Unavailable, median, quantile
from benches.trace import (
    SPAN,
    Request,
    Reuse,
    TraceError,
    distinct_blocks,
    least_recently_used,
    optimum,
    read_trace,
    synthetic_trace,
    unbounded,
)
from benches.written import written
from kvstore import Layout, Namespace, Store, Stream
from kvstore.errors import StoreFullError

__all__ = ["BENCH"]

_BLOCK = 32 << 10  # what a block takes in the file: one page
_TOKEN_BYTES = 56  # so that a block of 512 tokens fills its page but for the header
_LEAST_CAP = 12 << 20
_REPORT = 10.0  # seconds between lines of progress
# (requests, percent of the distinct blocks that a cap holds)
_SIZES: dict[Size, tuple[int, tuple[int, ...]]] = {
    "full": (12_031, (5, 10, 25, 50)),
    "quick": (1500, (10, 50)),
    "smallest": (120, (25,)),
}
_BLOCKS_OF_A_REQUEST = 16  # distinct ones, on average, of a service like that of the known trace


def _needs(size: Size) -> Needs:
    requests, shares = _SIZES[size]
    largest = max(requests * _BLOCKS_OF_A_REQUEST * _BLOCK * max(shares) // 100, _LEAST_CAP)
    return Needs(disk=largest + (256 << 20), memory=1 << 30)


@dataclass(slots=True)
class _Replay:
    """What was seen of one replay."""

    cap: int
    blocks: int
    hit_tokens: int = 0
    tokens: int = 0
    new_bytes: int = 0
    value_bytes: int = 0
    handed_bytes: int = 0
    refused: int = 0
    evicted_nodes: int = 0
    held_blocks: list[float] = field(default_factory=list)
    promote_ms: list[float] = field(default_factory=list)
    save_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.tokens


def _layout() -> Layout:
    return Layout(streams=(Stream("kv", "u8", (_TOKEN_BYTES,)),), block_tokens=SPAN, model="bench-trace")


class _Rows:
    """Rows that say which token they belong to, in memory that is used again and again."""

    def __init__(self, longest: int) -> None:
        self._given = np.zeros((longest, _TOKEN_BYTES), np.uint8)
        self._restored = np.zeros((longest, _TOKEN_BYTES), np.uint8)

    def of(self, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        rows = self._given[: tokens.size]
        rows.view(np.uint32)[:, 0] = tokens
        return rows

    def restore(self, namespace: Namespace, prompt: npt.NDArray[np.uint32]) -> int:
        """Restore the longest stored prefix, as a server does that needs the last token's logits; return its length."""
        with namespace.lease(prompt, limit=prompt.size - 1) as lease:
            if lease:
                lease.copy_into({"kv": self._restored[: lease.length]})
        if not np.array_equal(self._restored[: lease.length].view(np.uint32)[:, 0], prompt[: lease.length]):
            raise AssertionError("rows of another prefix were restored")
        return lease.length


def _replay(context: Context, requests: list[Request], share: int, blocks: int, path: Path) -> _Replay:
    """Promote and save the prompts in order, in a store whose cap has room for so many blocks."""
    seen = _Replay(max(blocks * _BLOCK, _LEAST_CAP), blocks)
    rows = _Rows(max(request.length for request in requests))
    clock = time.perf_counter
    began = said = clock()
    with Store.open(path, max_bytes=seen.cap) as store:
        namespace = store.namespace(_layout())
        before = written()[1]
        for place, request in enumerate(requests):
            prompt = request.tokens()
            start = clock()
            hit = rows.restore(namespace, prompt)
            restored = clock()
            seen.promote_ms.append((restored - start) * 1e3)
            first = hit - hit % SPAN
            arrays = {"kv": rows.of(prompt[first:])}
            start = clock()
            try:
                saved = namespace.save(prompt, arrays, start=first)
                seen.value_bytes += saved.written_bytes
            except StoreFullError:
                seen.refused += 1
            seen.save_ms.append((clock() - start) * 1e3)
            seen.hit_tokens += hit
            seen.tokens += request.length
            seen.new_bytes += (request.length - hit) * _TOKEN_BYTES
            if place % (len(requests) // 16 + 1) == 0 and place > len(requests) // 2:
                seen.held_blocks.append(store.stats().payload_bytes / (SPAN * _TOKEN_BYTES))
            if clock() - said > _REPORT:
                said = clock()
                left = (said - began) / (place + 1) * (len(requests) - place - 1)
                context.say(f"a cap of {share}% of the blocks: request {place + 1} of {len(requests)}, about {left:.0f} s left")
        seen.handed_bytes = written()[1] - before
        stats = store.stats()
        seen.evicted_nodes = stats.counters.evicted_nodes
        seen.stats = {name: getattr(stats, name) for name in ("live_bytes", "payload_bytes", "file_bytes", "nodes", "blocks")}
    seen.seconds = clock() - began
    shutil.rmtree(path)
    return seen


@dataclass(frozen=True, slots=True)
class _Found:
    """A cap: what was replayed, and what other caches reuse of the same requests."""

    share: int
    blocks: int
    held: int
    seen: _Replay
    best: Reuse
    lru: Reuse
    lru_of_held: Reuse

    @classmethod
    def of(cls, requests: list[Request], share: int, blocks: int, seen: _Replay) -> _Found:
        held = int(median(seen.held_blocks)) if seen.held_blocks else blocks
        best, lru = optimum(requests, blocks), least_recently_used(requests, blocks)
        return cls(share, blocks, held, seen, best, lru, least_recently_used(requests, held))

    def line(self) -> str:
        """As a person reads it."""
        seen = self.seen
        return (
            f"cap {self.share:2}% ({self.blocks} blocks, {self.held} held): {seen.rate:.3f} of the tokens found, optimum "
            f"{self.best.rate:.3f}, LRU over blocks {self.lru.rate:.3f}, over as many as were held {self.lru_of_held.rate:.3f}; "
            f"written {seen.handed_bytes / 1e9:.2f} GB for {seen.new_bytes / 1e9:.2f} GB of new rows; {seen.refused} saves "
            f"refused; {seen.seconds:.0f} s"
        )

    def record(self) -> dict[str, Any]:
        """As it goes into the JSON file."""
        seen = self.seen
        return {
            "cap_bytes": seen.cap,
            "cap_blocks": self.blocks,
            "held_blocks": self.held,
            "hit_rate": seen.rate,
            "optimum_rate": self.best.rate,
            "lru_rate": self.lru.rate,
            "lru_rate_of_held": self.lru_of_held.rate,
            "new_bytes": seen.new_bytes,
            "block_bytes": seen.value_bytes,
            "handed_bytes": seen.handed_bytes,
            "refused": seen.refused,
            "evicted_nodes": seen.evicted_nodes,
            "promote_ms": {"p50": median(seen.promote_ms), "p99": quantile(seen.promote_ms, 0.99)},
            "save_ms": {"p50": median(seen.save_ms), "p99": quantile(seen.save_ms, 0.99)},
            "seconds": seen.seconds,
            "end": seen.stats,
        }


def _requests(context: Context) -> tuple[list[Request], str]:
    count, _ = _SIZES[context.size]
    if context.trace is None:
        return synthetic_trace(count), "a synthetic trace with the statistics of a public one (no --trace was given)"
    try:
        requests = read_trace(context.trace, count)
    except TraceError as error:
        raise Unavailable(str(error)) from error
    return requests, f"the trace {context.trace.name}" + (
        f", its first {len(requests)} requests" if len(requests) == count and context.size != "full" else ""
    )


def _check_room(context: Context, blocks: int, share: int) -> None:
    """A trace may have more blocks than the one that `_needs` knows."""
    free = shutil.disk_usage(context.scratch).free
    if blocks * _BLOCK > free:
        raise Unavailable(
            f"a cap of {share}% of the trace's blocks takes {blocks * _BLOCK / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free; "
            "use --dir or --quick"
        )


def _run(context: Context) -> Outcome:
    requests, source = _requests(context)
    distinct = distinct_blocks(requests)
    everything = unbounded(requests)
    shares = _SIZES[context.size][1]
    caps = {share: max(distinct * share // 100, _LEAST_CAP // _BLOCK) for share in shares}
    for share, blocks in caps.items():
        _check_room(context, blocks, share)
    outcome = context.outcome
    outcome.figures |= {"source": source, "requests": len(requests), "distinct_blocks": distinct, "caps": {}}
    outcome.figures |= {"tokens": everything.tokens, "unbounded_rate": everything.rate, "token_bytes": _TOKEN_BYTES}
    outcome.lines.append(
        f"{source}: {len(requests)} requests, {everything.tokens / 1e6:.1f} M tokens, {distinct} distinct blocks of {SPAN}; "
        f"{everything.rate:.3f} of the tokens were in an earlier prompt"
    )
    found: list[_Found] = []
    for share, blocks in caps.items():
        seen = _replay(context, requests, share, blocks, context.scratch / "store")
        found.append(_Found.of(requests, share, blocks, seen))
        outcome.figures["caps"][str(share)] = found[-1].record()
        outcome.lines.append(found[-1].line())
        _describe(outcome, source, found)
    return outcome


def _describe(outcome: Outcome, source: str, found: list[_Found]) -> None:
    """What the report shows of the caps so far."""
    outcome.tables = [
        Table(
            f"Tokens found again, of all tokens ({source})",
            (
                "cap, % of the distinct blocks",
                "blocks at the cap",
                "blocks held",
                "kvstore",
                "optimum",
                "LRU over blocks",
                "LRU, blocks held",
                "of the optimum",
                "of LRU, blocks held",
            ),
            tuple(
                (
                    own.share,
                    own.blocks,
                    own.held,
                    own.seen.rate,
                    own.best.rate,
                    own.lru.rate,
                    own.lru_of_held.rate,
                    own.seen.rate / own.best.rate,
                    own.seen.rate / own.lru_of_held.rate,
                )
                for own in found
            ),
            "The optimum is Belady's for whole blocks of 512 tokens, with every block before it held too, by one who knows the "
            "future and need not take in what never returns: an upper bound for every policy on blocks. A cap counts one page of "
            "32 KiB for a block. Blocks held are what the payload in the store amounts to, the median over the second half: the "
            "rest of the cap is room that LMDB needs, the index, and tails. Tokens of the index weigh a fourteenth of the rows at "
            "this scale, where they weigh less than a thousandth of real ones.",
        ),
        Table(
            "Written, against the rows that were new, and times in ms",
            (
                "cap, % of the distinct blocks",
                "new rows, GB",
                "blocks written, of new rows",
                "all writes, of new rows",
                "promote p50",
                "p90",
                "p99",
                "save p50",
                "p90",
                "p99",
                "saves refused",
            ),
            tuple(
                (
                    own.share,
                    own.seen.new_bytes / 1e9,
                    own.seen.value_bytes / own.seen.new_bytes,
                    own.seen.handed_bytes / own.seen.new_bytes,
                    *(quantile(own.seen.promote_ms, q) for q in (0.5, 0.9, 0.99)),
                    *(quantile(own.seen.save_ms, q) for q in (0.5, 0.9, 0.99)),
                    own.seen.refused,
                )
                for own in found
            ),
            "Each block has a header of up to 4 KiB: an eighth of its page at this scale, a thousandth of a block of 4 MiB. All "
            "writes include the index, of which a block that comes or goes changes one or two pages of 32 KiB whatever its size: "
            "more than the rows here, and a hundredth of a block of 4 MiB. Saves are durable. Promotes restore into arrays and "
            "check every byte.",
        ),
    ]
    lines: dict[str, list[tuple[float, float]]] = {
        "kvstore": [(own.share, own.seen.rate) for own in found],
        "optimum": [(own.share, own.best.rate) for own in found],
        "LRU over blocks": [(own.share, own.lru.rate) for own in found],
    }
    outcome.plots = [
        Plot("hit-rate", "Tokens found again", "cap, % of the distinct blocks", "share of all tokens", lines, log_x=True)
    ]


BENCH = Bench(
    "trace",
    "an hour of requests replayed at caps of 5 to 50% of its blocks: hit rate against the optimum, bytes written",
    _needs,
    _run,
    "Each request restores the longest stored prefix of its prompt (but for its last token) into arrays and then saves the prompt, "
    "durably. The rows of a token are scaled down to 56 bytes, so that a block of 512 tokens fills one page of the file with its "
    "header. Answers are not stored, since the trace says nothing of their tokens; a prompt that contains an earlier answer brings "
    "them. The optimum and plain LRU are computed from the same trace.",
    "The optimum knows what will be asked for; no store can. What kvstore lacks to it is what it could not know, and what index,\n"
    "free pages and whole blocks take of the cap.",
)
