"""match: how long it takes to find the longest stored prefix of a prompt, among ever more sessions with prefixes in common."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from benches.filling import fill
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Target, median, quantile
from benches.indexes import BlockHashes
from benches.prefixes import BLOCK, LONG, PREFIXES, SESSION, SHARED, Prompt, prompts, random_tokens, session
from benches.sessions import Array
from kvstore import Layout, Store, Stream

__all__ = ["BENCH"]

_SERVER_BLOCK = 16
_SERVER_MOST = 10_000  # sessions whose hashes by small blocks are kept: more would take gigabytes
_SESSION_DISK = 72 << 10  # bytes of a session in the file: two blocks of a page, and its part of the index
_LIMIT_MS, _LIMIT_GROWTH = 1.0, 2.0
# (long prompt, sessions in the stores, the two of them that the targets compare, calls)
_SIZES: dict[Size, tuple[int, tuple[int, ...], tuple[int, int], int]] = {
    "full": (100_000, (10, 100, 1000, 10_000, 100_000), (1000, 10_000), 1000),
    "quick": (100_000, (10, 100, 1000), (100, 1000), 300),
    "smallest": (6000, (10, 30), (10, 30), 20),
}


def _needs(size: Size) -> Needs:
    _, counts, _, _ = _SIZES[size]
    return Needs(disk=sum(counts) * _SESSION_DISK + len(counts) * (64 << 20), memory=(1 << 30) + max(counts) * (8 << 10))


def _layout() -> Layout:
    """8 bytes a token, so that a block takes one page."""
    return Layout(streams=(Stream("kv", "u8", (8,)),), block_tokens=BLOCK, model="bench-match")


def _rows(tokens: Prompt) -> dict[str, Array]:
    """Rows in which the tokens stand, and who wrote them: no two sessions share a block by accident."""
    rows = np.empty((tokens.size, 2), np.uint32)
    rows[:, 0], rows[:, 1] = tokens, tokens[-1]
    return {"kv": rows.view(np.uint8)}


class _Known:
    """One number of sessions: a store that holds them, and dictionaries that know them."""

    def __init__(self, context: Context, sessions: int, long: Prompt) -> None:
        self.sessions = sessions
        self._context = context
        self._path = context.scratch / f"store{sessions}"
        self._store = Store.open(self._path, max_bytes=sessions * _SESSION_DISK * 5 // 4 + (64 << 20))
        self.namespace = self._store.namespace(_layout())
        try:
            self._fill(long)
        except BaseException:
            self.close()
            raise
        small = [_SERVER_BLOCK] if sessions <= _SERVER_MOST else []
        self.dictionaries = {block: BlockHashes(block) for block in [BLOCK, *small]}
        for dictionary in self.dictionaries.values():
            dictionary.add(long)
            for number in range(sessions):
                dictionary.add(session(number))

    def _fill(self, long: Prompt) -> None:
        """Save the sessions, the long one in their middle."""
        began = time.perf_counter()

        def made(numbers: range) -> Iterator[tuple[Prompt, dict[str, Array]]]:
            for number in numbers:
                if number % 10_000 == 9999:
                    left = (time.perf_counter() - began) / number * (self.sessions - number)
                    self._context.say(f"saving {self.sessions} sessions: {number + 1}, about {left:.0f} s left")
                tokens = session(number)
                yield tokens, _rows(tokens)

        half = self.sessions // 2
        fill(self.namespace, made(range(half)))
        self.namespace.save(long, _rows(long))
        fill(self.namespace, made(range(half, self.sessions)))
        self.fill_seconds = time.perf_counter() - began
        found = self._store.verify()
        if not found.ok or found.nodes < self.sessions:
            raise AssertionError(f"the store that was filled is not what saves make: {found}")

    def sides(self) -> dict[str, tuple[Callable[[Prompt], int], int]]:
        """Ways to look for a prompt's prefix, and to how many tokens each rounds down."""

        def stored(prompt: Prompt) -> int:
            found = self.namespace.match(prompt)
            return found.length if found else 0

        sides: dict[str, tuple[Callable[[Prompt], int], int]] = {"kvstore": (stored, 1)}
        return sides | {_named(block): (known.match, block) for block, known in self.dictionaries.items()}

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._path, ignore_errors=True)


def _named(block: int) -> str:
    return f"dictionary, blocks of {block}"


def _time(known: list[_Known], prompt: Prompt, expected: int, calls: int) -> dict[tuple[int, str], list[float]]:
    """Milliseconds of each call, by number of sessions and side. All take turns; slow sides are called less often."""
    sides = {(own.sessions, name): side for own in known for name, side in own.sides().items()}
    for key, (match, step) in sides.items():
        if match(prompt) != expected // step * step:
            raise AssertionError(f"{key} knows {match(prompt)} tokens of the prompt, expected {expected}")
    times: dict[tuple[int, str], list[float]] = {key: [] for key in sides}
    clock = time.perf_counter
    for call in range(calls):
        for key, (match, step) in sides.items():
            if step == _SERVER_BLOCK and call % 10:
                continue
            start = clock()
            match(prompt)
            times[key].append((clock() - start) * 1e3)
    return times


def _run(context: Context) -> Outcome:
    length, counts, compared, calls = _SIZES[context.size]
    long = random_tokens(LONG, length)
    outcome = context.outcome
    rows: list[tuple[Any, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        known: list[_Known] = []
        for sessions in counts:
            known.append(_Known(context, sessions, long))
            stack.callback(known[-1].close)
        outcome.figures["fill_seconds"] = {str(own.sessions): own.fill_seconds for own in known}
        for name, (what, prompt, expected) in prompts(long).items():
            context.say(f"matching: {what}")
            times = _time(known, prompt, expected, calls)
            medians = {key: median(t) for key, t in times.items()}
            outcome.figures[name] = {
                "prompt_tokens": int(prompt.size),
                "matched_tokens": expected,
                "calls": calls,
                "ms": {
                    f"{sessions}, {side}": {"p50": median(t), "p90": quantile(t, 0.9), "p99": quantile(t, 0.99)}
                    for (sessions, side), t in times.items()
                },
            }
            for sessions in counts:
                ours, whole = times[sessions, "kvstore"], times[sessions, _named(BLOCK)]
                small = times.get((sessions, _named(_SERVER_BLOCK)))
                rows.append(
                    (
                        what,
                        f"{sessions:,}",
                        *(quantile(ours, q) for q in (0.5, 0.9, 0.99)),
                        *(quantile(whole, q) for q in (0.5, 0.99)),
                        *(quantile(small, q) if small else None for q in (0.5, 0.99)),
                        # against the dictionary that a store of the same blocks would have
                        medians[sessions, "kvstore"] / medians[sessions, _named(BLOCK)],
                    )
                )
            for sessions, side in times:
                lines.setdefault(f"{name.replace('_', ', ')}: {side}", []).append((sessions, medians[sessions, side]))
            few, many = (medians[sessions, "kvstore"] for sessions in compared)
            growth = many / few
            outcome.figures[name]["growth"] = growth
            shown = "; ".join(f"{s} sessions p50 {medians[s, 'kvstore']:.3f} ms" for s in counts)
            slow = f"{medians[counts[-1], _named(BLOCK)]:.3f}"
            outcome.lines.append(f"{what} ({prompt.size} tokens, {expected} known): {shown}; dictionary {slow} ms at {counts[-1]}")
            if name == "long":
                outcome.targets = [
                    Target(f"median at {compared[0]} sessions, ms", few, _LIMIT_MS),
                    Target(f"median at {compared[1]} sessions over that at {compared[0]}", growth, _LIMIT_GROWTH),
                ]
    outcome.tables = [
        Table(
            f"Finding the longest known prefix of a prompt (long: {length} tokens; short: {SESSION}), ms",
            (
                "prompt",
                "sessions",
                "kvstore p50",
                "p90",
                "p99",
                f"dictionary, blocks of {BLOCK}: p50",
                f"p99, blocks of {BLOCK}",
                f"dictionary, blocks of {_SERVER_BLOCK}: p50",
                f"p99, blocks of {_SERVER_BLOCK}",
                f"kvstore p50, times a dictionary's of blocks of {BLOCK}",
            ),
            tuple(rows),
            "A dictionary holds a BLAKE3 hash for each whole block of a session and all that precedes it; it is in memory, gone "
            f"with its process, compares no tokens and finds whole blocks only. Blocks of {_SERVER_BLOCK} are what servers have; "
            f"beyond {_SERVER_MOST} sessions they would take most of a gigabyte here. kvstore finds the exact token, in the file's "
            "index.",
        )
    ]
    plotted = {name: points for name, points in lines.items() if name.startswith(("long:", "miss:", "session:"))}
    outcome.plots = [
        Plot("sessions", "Finding a prefix among ever more sessions", "sessions", "ms, p50", plotted, log_x=True, log_y=True)
    ]
    return outcome


BENCH = Bench(
    "match",
    "find the longest stored prefix of a 100,000-token prompt among 10 to 100,000 sessions",
    _needs,
    _run,
    f"Sessions of {SESSION} tokens, of which the first {SHARED} are those of one of {PREFIXES} prefixes, and one of 100,000. A\n"
    "store for each number of sessions, all open at once; every call goes to the next store and the next side. Nothing is\n"
    "restored.",
    "Where few tokens have to be looked at, a dictionary in memory is sooner: a call of kvstore opens a read transaction of\n"
    "the file, walks nodes that lie in its pages, whose sums it checks, and compares tokens; the dictionary hashes a block\n"
    "or two. For that it is there after a restart, for all processes at once, and answers to the token. For long prompts\n"
    "hashing every block takes longer than comparing every token.",
)
