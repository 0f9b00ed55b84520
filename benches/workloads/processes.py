"""processes: several processes promote from one store while another one writes to it or doesn't, against one process alone."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.children import Worker
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, median, quantile
from benches.sessions import TOKEN_BYTES, arrays_for, large_layout, random_tokens
from kvstore import Store

__all__ = ["BENCH"]

_SOON = 0.05  # seconds from asking to beginning
_SEED = 500
# (sessions, tokens of each, most readers, seconds of a trial, rounds)
_SIZES: dict[Size, tuple[int, int, int, float, int]] = {
    "full": (8, 4000, 8, 2.0, 7),
    "quick": (4, 2000, 4, 0.7, 3),
    "smallest": (2, 500, 2, 0.15, 1),
}
_COUNTS = (1, 2, 4, 8)


def _needs(size: Size) -> Needs:
    sessions, tokens, readers, _, _ = _SIZES[size]
    each = tokens * TOKEN_BYTES
    return Needs(disk=(sessions + 8) * each + (256 << 20), memory=(sessions + 2 + 2 * readers) * each + (readers + 2) * (96 << 20))


@dataclass(frozen=True, slots=True, order=True)
class _Trial:
    """How many processes do what."""

    readers: int
    writer: bool

    def __str__(self) -> str:
        return f"{self.readers} reader{'s' if self.readers > 1 else ''}" + (", a writer" if self.writer else "")


@dataclass(slots=True)
class _Seen:
    """What the rounds of a trial gave: bytes a second of all readers together; milliseconds of promotes and cascades."""

    speeds: list[float] = field(default_factory=list)
    promotes: list[float] = field(default_factory=list)
    cascades: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


class _Processes:
    """The processes, started once; those that a trial doesn't need wait."""

    def __init__(self, stack: ExitStack, context: Context, path: Path) -> None:
        self._sessions, self._tokens, readers, self._seconds, _ = _SIZES[context.size]
        seeds = [_SEED + n for n in range(self._sessions)]
        self._readers = [stack.enter_context(Worker("benches.promoting")) for _ in range(readers)]
        self._writer = stack.enter_context(Worker("benches.promoting"))
        self.all = [*self._readers, self._writer]
        for child in self._readers:
            child.send("prepare", capacity=self._tokens, sessions=seeds, tokens=self._tokens)
        self._writer.send("prepare", capacity=self._tokens, sessions=[], tokens=self._tokens)
        for child in self.all:
            child.receive()
        self.before = [child.ask("memory") for child in self._readers]
        for child in self.all:
            child.ask("open", path=str(path))
        self._count = 0

    def run(self, trial: _Trial, seen: _Seen) -> None:
        """Let the processes work side by side for the time of a trial."""
        begin = time.monotonic() + _SOON
        for place, child in enumerate(self._readers[: trial.readers]):
            order = [(place + n) % self._sessions for n in range(self._sessions)]
            child.send("promotes", begin=begin, seconds=self._seconds, order=order)
        if trial.writer:
            self._count += 1000
            self._writer.send("cascades", begin=begin, seconds=self._seconds, seed=1_000_000 + self._count, length=self._tokens)
        speed = 0.0
        for child in self._readers[: trial.readers]:
            answer = child.receive()
            speed += len(answer["ms"]) * (self._tokens - 1) * TOKEN_BYTES / answer["seconds"]
            seen.promotes += answer["ms"]
        if trial.writer:
            answer = self._writer.receive()
            seen.cascades += answer["ms"]
            seen.written.append(len(answer["ms"]) * self._tokens * TOKEN_BYTES / answer["seconds"])
        seen.speeds.append(speed)

    def memory(self) -> dict[str, float]:
        """MiB, of all readers: their own beyond the arrays; pages of files, each process's by themselves, and each page once."""
        now = [child.ask("memory") for child in self._readers]
        own = [a["own"] - b["own"] for a, b in zip(now, self.before, strict=True)]
        files = [a["resident"] - a["own"] for a in now]
        shared = [a["share"] - a["own"] for a in now]
        return {
            "readers": len(now),
            "own_mib_largest": max(own) / 2**20,
            "file_pages_mib_largest": max(files) / 2**20,
            "file_pages_mib_sum": sum(files) / 2**20,
            "file_pages_mib_shared_out": sum(shared) / 2**20,
        }


def _run(context: Context) -> Outcome:
    sessions, tokens, most, _, rounds = _SIZES[context.size]
    layout = large_layout()
    path = context.scratch / "store"
    context.say(f"saving {sessions} sessions of {tokens} tokens, {sessions * tokens * TOKEN_BYTES / 1e9:.2f} GB")
    with Store.open(path, max_bytes=(sessions + 6) * tokens * TOKEN_BYTES + (192 << 20)) as store:
        namespace = store.namespace(layout)
        for number in range(sessions):
            namespace.save(random_tokens(_SEED + number, tokens), arrays_for(layout, tokens, seed=number))
    trials = [_Trial(count, writer) for count in _COUNTS if count <= most for writer in (False, True)]
    seen = {trial: _Seen() for trial in trials}
    with ExitStack() as stack:
        processes = _Processes(stack, context, path)
        processes.run(_Trial(most, True), _Seen())  # everything is mapped and in memory from here on
        began = time.perf_counter()
        for place in range(rounds):
            for trial in trials if place % 2 == 0 else reversed(trials):
                processes.run(trial, seen[trial])
            context.note("promotes", {f"{trial}, ms": own.promotes for trial, own in seen.items()})
            left = (time.perf_counter() - began) / (place + 1) * (rounds - place - 1)
            context.say(f"round {place + 1} of {rounds}" + (f", about {left:.0f} s left" if left >= 1 else ""))
        memory = processes.memory()
        for child in processes.all:
            child.ask("close")
    with Store.open(path) as store:
        found = store.verify(deep=context.size != "full")
        if not found.ok:
            raise AssertionError(f"the store does not verify: {found.problems[0]}")
    _describe(context.outcome, seen, memory, tokens)
    return context.outcome


def _describe(outcome: Outcome, seen: dict[_Trial, _Seen], memory: dict[str, float], tokens: int) -> None:
    outcome.figures |= {"session_bytes": tokens * TOKEN_BYTES, "memory": memory, "trials": {}}
    alone = seen[_Trial(1, False)]
    rows: list[tuple[Any, ...]] = []
    for trial, own in seen.items():
        ratio = median([a / b for a, b in zip(own.speeds, alone.speeds, strict=True)])
        ms = [quantile(own.promotes, q) for q in (0.5, 0.9, 0.99)]
        limit = quantile(alone.promotes, 0.99)
        saved = median(own.written) / 1e9 if own.written else None
        rows.append(
            (
                trial.readers,
                int(trial.writer),
                median(own.speeds) / 1e9,
                ratio,
                *ms,
                ms[2] / limit,
                saved,
                quantile(own.cascades, 0.5) if own.cascades else None,
                quantile(own.cascades, 0.99) if own.cascades else None,
            )
        )
        outcome.figures["trials"][str(trial)] = {
            "readers": trial.readers,
            "writers": int(trial.writer),
            "gb_s": [speed / 1e9 for speed in own.speeds],
            "ratio_to_one_alone": ratio,
            "promotes": len(own.promotes),
            "promote_ms": dict(zip(("p50", "p90", "p99"), ms, strict=True)),
            "cascades": len(own.cascades),
            "cascade_gb_s": saved,
            "cascade_ms": {q: quantile(own.cascades, s) for q, s in (("p50", 0.5), ("p99", 0.99))} if own.cascades else None,
        }
        outcome.lines.append(
            f"{trial!s:20} {median(own.speeds) / 1e9:6.2f} GB/s together, {ratio:.2f} of one alone; promote p50 {ms[0]:.1f} ms, "
            "p99 "
            f"{ms[2]:.1f} ms" + (f"; cascades {saved:.2f} GB/s, p50 {median(own.cascades):.0f} ms" if saved is not None else "")
        )
    outcome.lines.append(
        f"memory: {memory['readers']:.0f} readers have {memory['file_pages_mib_sum']:.0f} MiB of the file mapped, each page "
        f"counted once {memory['file_pages_mib_shared_out']:.0f} MiB; of their own, beyond arrays, at most "
        f"{memory['own_mib_largest']:.0f} MiB each"
    )
    outcome.tables = [
        Table(
            f"Promotes of sessions of {tokens} tokens ({tokens * TOKEN_BYTES / 2**20:.0f} MiB), warm, by processes side by side",
            (
                "readers",
                "writers",
                "GB/s together",
                "of one reader alone",
                "promote p50, ms",
                "p90, ms",
                "p99, ms",
                "p99, of one alone",
                "cascades, GB/s",
                "cascade p50, ms",
                "cascade p99, ms",
            ),
            tuple(rows),
            "Each reader copies with as many threads as the library takes by default. A cascade is timed until it is durable.",
        ),
        Table(
            "Memory of the readers, MiB",
            ("readers", "own, beyond arrays, at most", "file pages, summed", "file pages, each once", "once, of the sum"),
            (
                (
                    int(memory["readers"]),
                    memory["own_mib_largest"],
                    memory["file_pages_mib_sum"],
                    memory["file_pages_mib_shared_out"],
                    memory["file_pages_mib_shared_out"] / max(memory["file_pages_mib_sum"], 1e-9),
                ),
            ),
            "The store's file is in the page cache once, whoever maps it: what the kernel shares out among the processes is what "
            "it takes.",
        ),
    ]
    outcome.plots = [
        Plot(
            "throughput",
            "Readers side by side",
            "reader processes",
            "GB/s together",
            {
                name: [(trial.readers, median(own.speeds) / 1e9) for trial, own in seen.items() if trial.writer == writer]
                for name, writer in (("readers only", False), ("beside a writer", True))
            },
        ),
        Plot(
            "latency",
            "A promote, by how many work at once",
            "reader processes",
            "p99 of a promote, ms",
            {
                name: [(trial.readers, quantile(own.promotes, 0.99)) for trial, own in seen.items() if trial.writer == writer]
                for name, writer in (("readers only", False), ("beside a writer", True))
            },
            log_y=True,
        ),
    ]


BENCH = Bench(
    "processes",
    "1 to 8 processes promote from one store, beside a writer or not: speed together, p99 of a promote, memory",
    _needs,
    _run,
    "Processes of their own, started once, work side by side for two seconds: readers promote sessions that are in the page cache, "
    "one after another, each from another one on; the writer cascades new sessions, durably, and evicts them again. All trials "
    "take turns in each of the rounds, and what is compared with one reader alone is compared within a round.",
)
