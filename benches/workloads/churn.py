"""churn: many turnovers of a store at its cap: how much of the cap holds payload, how fast saves stay, how free space is cut up."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.harness import Bench, Cell, Context, Needs, Outcome, Plot, Size, Table, Target, median, quantile
from kvstore import Layout, Namespace, Store, Stream
from kvstore.env import Environment
from kvstore.errors import StoreFullError
from kvstore.records.block import Ref

__all__ = ["BENCH"]

_TOKEN_BYTES = 4096
_ROOM = 64 << 20
_PLAIN_STEP = 8 << 20
# (cap, turnovers, bytes of a plain file written in each turnover)
_SIZES: dict[Size, tuple[int, int, int]] = {
    "full": (1 << 30, 20, 256 << 20),
    "quick": (256 << 20, 8, 64 << 20),
    "smallest": (32 << 20, 2, 8 << 20),
}
_MIB = 1 << 20
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class _Load:
    """Sessions to store: the blocks of their layouts, whether they end where a block ends, and what share the cap has to give."""

    name: str
    title: str
    block_bytes: tuple[int, ...]
    whole: bool
    share: float


_LOADS = (
    _Load("equal", "blocks of 1 MiB", (_MIB,), True, 0.85),
    _Load("tails", "blocks of 4 MiB and a tail of any length", (4 * _MIB,), False, 0.85),
    _Load("mixed", "blocks of 256 KiB, 1 MiB and 4 MiB with tails", (256 * _KIB, _MIB, 4 * _MIB), False, 0.75),
)


@dataclass(slots=True)
class _Turnover:
    """What was seen in one turnover: of the store's saves, and of plain writes between them."""

    saved_bytes: int = 0
    save_seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    plain_bytes: int = 0
    shares: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def save_speed(self) -> float:
        return self.saved_bytes / sum(self.save_seconds)

    @property
    def plain_speed(self) -> float:
        return self.plain_bytes / sum(self.plain_seconds)


def _needs(size: Size) -> Needs:
    cap, _, plain = _SIZES[size]
    return Needs(disk=cap + plain + (256 << 20), memory=cap + (512 << 20))


class _Sessions:
    """Sessions whose rows no other has: views on one pool of random bytes, each row stamped with its session's number."""

    def __init__(self, largest: int) -> None:
        self._pool = np.frombuffer(np.random.default_rng(0).bytes(largest + _ROOM), np.uint8)
        self._random = random.Random(3)
        self._count = 0

    def make(self, tokens: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Tokens and rows of a new session."""
        self._count += 1
        prompt = np.arange(tokens, dtype=np.uint32)
        prompt[0] = self._count
        at = self._random.randrange(_ROOM // 2)
        rows = self._pool[at : at + tokens * _TOKEN_BYTES].reshape(tokens, _TOKEN_BYTES).copy()
        rows[:, :4] = np.frombuffer(self._count.to_bytes(4, "little"), np.uint8)
        return prompt, rows


def _plain(file: Any, size: int, at: int) -> float:
    block = bytes(_PLAIN_STEP)
    began = time.perf_counter()
    for start in range(0, size, _PLAIN_STEP):
        os.pwrite(file.fileno(), block, at + start)
        os.fdatasync(file.fileno())
    return time.perf_counter() - began


def _churn(context: Context, load: _Load, path: Path) -> tuple[list[_Turnover], dict[str, Any]]:
    cap, count, plain_bytes = _SIZES[context.size]
    sizes = [cap // part for part in (128, 64, 42, 21)]
    chance = random.Random(5)
    sessions = _Sessions(sizes[-1])
    recent: list[tuple[Namespace, npt.NDArray[np.uint32]]] = []
    turnovers: list[_Turnover] = []
    began = time.perf_counter()
    with Store.open(path, max_bytes=cap) as store, (context.scratch / "plain").open("wb") as plain:
        namespaces = [
            store.namespace(
                Layout((Stream("kv", "u8", (_TOKEN_BYTES,)),), block_tokens=size // _TOKEN_BYTES, model=f"churn-{size}")
            )
            for size in load.block_bytes
        ]
        for place in range(count):
            seen = _Turnover()
            while seen.saved_bytes < cap:
                namespace = chance.choice(namespaces)
                block = namespace.layout.block_tokens
                tokens = max(chance.choice(sizes) // _TOKEN_BYTES // block, 1) * block
                tokens += 0 if load.whole else chance.randrange(block)
                prompt, rows = sessions.make(tokens)
                recent = [*recent, (namespace, prompt)][-400:]
                for other, earlier in chance.choices(recent, k=2):  # used again at random: not first in, first out
                    with other.lease(earlier):
                        pass
                start = time.perf_counter()
                try:
                    namespace.save(prompt, {"kv": rows})
                except StoreFullError:
                    seen.refused += 1
                seen.save_seconds.append(time.perf_counter() - start)
                seen.saved_bytes += rows.nbytes
                if seen.plain_bytes < plain_bytes:  # spread over the turnover, since the disk's speed changes
                    step = min(plain_bytes // 16 // _PLAIN_STEP * _PLAIN_STEP + _PLAIN_STEP, plain_bytes - seen.plain_bytes)
                    seen.plain_seconds.append(_plain(plain, step, seen.plain_bytes))
                    seen.plain_bytes += step
                if place:
                    seen.shares.append(store.stats().payload_bytes / cap)
            turnovers.append(seen)
            left = (time.perf_counter() - began) / (place + 1) * (count - place - 1)
            context.say(f"{load.name}: turnover {place + 1} of {count}" + (f", about {left:.0f} s left" if left >= 1 else ""))
        stats = store.stats()
        found = store.verify()
        if not found.ok:
            raise AssertionError(f"the store does not verify after {count} turnovers: {found.problems[0]}")
        runs = _free_runs(namespaces[0].scope.store.environment, max(load.block_bytes))
    return turnovers, {
        "file_share": stats.file_bytes / cap,
        "live_share": stats.live_bytes / cap,
        "evicted_nodes": stats.counters.evicted_nodes,
        **runs,
    }


def _free_runs(environment: Environment, block_bytes: int) -> dict[str, Any]:
    """How the space between blocks is cut up. Pages of the index between them count as free: they are few and move."""
    with environment.reading() as txn:
        refs = [Ref.decode(key, raw) for key, raw in txn.items(txn.db.refs)]
    end, page = environment.end_bytes(), environment.page_bytes
    taken = sorted((ref.offset // page, ref.pages) for ref in refs)
    ends = [0, *(start + pages for start, pages in taken)]
    starts = [*(start for start, _ in taken), end // page]
    runs = [start - stop for start, stop in zip(starts, ends, strict=True) if start > stop]
    usable = sum(run for run in runs if run * page >= block_bytes + page)
    return {"free_runs": len(runs), "free_bytes": sum(runs) * page, "in_runs_of_a_block": usable / max(sum(runs), 1)}


def _run(context: Context) -> Outcome:
    cap, count, _ = _SIZES[context.size]
    outcome = context.outcome
    outcome.figures |= {"cap_bytes": cap, "turnovers": count, "token_bytes": _TOKEN_BYTES}
    rows: list[tuple[Cell, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for load in _LOADS:
        turnovers, figures = _churn(context, load, context.scratch / load.name)
        for file in (context.scratch / load.name).iterdir():
            file.unlink()
        shares = [share for seen in turnovers for share in seen.shares]
        ratios = [seen.save_speed / seen.plain_speed for seen in turnovers]
        third = max(count // 3, 1)
        early, late = median(ratios[1 : 1 + third]), median(ratios[-third:])
        slowest = max(seconds for seen in turnovers for seconds in seen.save_seconds)
        refused = sum(seen.refused for seen in turnovers)
        outcome.figures[load.name] = {
            "payload_share": {"least": min(shares), "median": median(shares), "last": shares[-1]},
            "save_over_plain": ratios,
            "save_bytes_per_second": [seen.save_speed for seen in turnovers],
            "slowest_save_seconds": slowest,
            "saves": sum(len(seen.save_seconds) for seen in turnovers),
            "refused": refused,
            **figures,
        }
        outcome.lines += [
            f"{load.name} ({load.title}): payload {min(shares):.3f} to {max(shares):.3f} of the cap, median {median(shares):.3f}; "
            f"file {figures['file_share']:.3f}; {refused} of {outcome.figures[load.name]['saves']} saves refused",
            f"  speed over plain writes {early:.2f} early, {late:.2f} late; slowest save {slowest * 1e3:.0f} ms; "
            f"{figures['free_runs']} free runs, {figures['in_runs_of_a_block']:.0%} of the free bytes in runs of a block or more",
        ]
        slow = quantile([seconds for seen in turnovers for seconds in seen.save_seconds], 0.99)
        rows.append(
            (
                load.title,
                min(shares),
                median(shares),
                figures["file_share"],
                early,
                late,
                slow * 1e3,
                slowest * 1e3,
                figures["in_runs_of_a_block"],
                refused,
            )
        )
        lines[load.title] = [(place + 1.0, ratio) for place, ratio in enumerate(ratios)]
        outcome.tables, outcome.plots = [_table(cap, count, rows)], [_plot(lines)]
        outcome.targets += [
            Target(f"{load.name}: payload over the cap, median", median(shares), load.share, at_most=False),
            Target(f"{load.name}: directory over the cap", figures["file_share"], 1.0),
            Target(f"{load.name}: saves refused", refused, 0),
        ]
    return outcome


def _table(cap: int, count: int, rows: list[tuple[Cell, ...]]) -> Table:
    heads = (
        "blocks",
        "payload, ratio to the cap, least",
        "payload, ratio to the cap, median",
        "file, ratio to the cap",
        "save, ratio to plain writes, early",
        "save, ratio to plain writes, late",
        "p99 of a save, ms",
        "slowest, ms",
        "free bytes in runs of a block, ratio to all",
        "refused",
    )
    return Table(f"{count} turnovers of a cap of {cap >> 20} MiB", heads, tuple(rows))


def _plot(lines: dict[str, list[tuple[float, float]]]) -> Plot:
    return Plot("speed", "Saves over turnovers at the cap", "turnover", "speed, ratio to plain writes", dict(lines))


_METHOD = """\
Sessions of 8 to 48 MiB that share nothing are saved until the cap has been written 20 times over; meanwhile two that were saved
earlier, chosen at random, are used again with each, so that what goes is not what came first. Three loads: blocks of one size;
large blocks with tails of any length; three sizes of blocks. After each save the payload's share of the cap is taken. Speed is
against plain writes of 8 MiB with fdatasync, made between the saves of the same turnover. At the end the store is verified, and
the free space between its blocks is looked at: how much of it lies in runs where a block finds room."""

BENCH = Bench(
    "churn",
    "20 turnovers at the cap: payload's share of it, speed over time, free space, with equal and mixed blocks",
    _needs,
    _run,
    _METHOD,
    """\
Saves at the cap are slower than plain writes. Each is a session of its own, shorter than that of `save`, with a sync for
each piece of 16 MiB; each piece also evicts what it needs room for, in its own transaction, so the records of what goes are written
too; and the space that it gets lies in several places of the file, where the plain file is written from its beginning to its end.
What was tried for it is told in [architecture.md](architecture.md#space).""",
)
