"""hybrid: sessions whose states can't be cut: a restore beside the plain copy of its bytes, and what checkpoints take."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.conversation import Conversation, Kept, room, talk
from benches.harness import Bench, Cell, Context, Needs, Outcome, Plot, Seconds, Size, Table, Target, median, pairs, quantile
from benches.hybrids import Hybrid, HybridEngine
from benches.sessions import Array, bytes_of, random_tokens, touched
from kvstore import Namespace, Store

__all__ = ["BENCH"]

_THREADS = 2
_LIMIT_MS, _KEPT = 5.0, 2
_SMALL, _LARGE, _TINY = Hybrid(8, "f16"), Hybrid(32, "f32"), Hybrid(1, "f16")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How large it is: lengths of sessions, models, rounds of each comparison, and the conversation."""

    lengths: tuple[int, ...]
    models: tuple[Hybrid, ...]
    rounds: int
    talk: Conversation


# at no boundary of anything, so that there is an unfinished block and an unfinished row of the index
_SIZES: dict[Size, _Plan] = {
    "full": _Plan(
        (2000, 8100, 32_300), (_SMALL, _LARGE), 100, Conversation(first=2000, user=150, hidden=250, answer=100, turns=30)
    ),
    "quick": _Plan((2000, 8100), (_SMALL, _LARGE), 20, Conversation(first=1000, user=150, hidden=250, answer=100, turns=6)),
    "smallest": _Plan((600,), (_TINY,), 2, Conversation(first=200, user=50, hidden=30, answer=20, turns=4)),
}


def _largest(plan: _Plan) -> tuple[int, int]:
    """Bytes of the longest session, and of the largest states, at most."""
    layouts = [model.layout() for model in plan.models]
    rows = max(layout.token_bytes for layout in layouts) * max(*plan.lengths, plan.talk.longest)
    return int(rows), max(sum(s.max_bytes for s in layout.states) for layout in layouts)


def _needs(size: Size) -> Needs:
    plan = _SIZES[size]
    rows, states = _largest(plan)
    stores = [room(plan.talk, model, branches=False) for model in plan.models] + [room(plan.talk, plan.models[0], branches=True)]
    disk = max(3 * (rows + states) + (256 << 20), max(stores) + states + rows)
    return Needs(disk=disk, memory=6 * (rows + states) + (1 << 30))


class _Plain:
    """The baseline: the session's bytes in one run, out of a map of a plain file."""

    def __init__(self, path: Path, arrays: dict[str, Array], states: int, pool: ThreadPoolExecutor) -> None:
        with path.open("wb", buffering=0) as file:
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._map: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        self._into = np.ones(self._map.size, np.uint8)
        self._cut, self._pool = self._map.size - states, pool

    def _copy(self, into: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        step = -(-source.size // _THREADS)
        starts = range(0, source.size, step)
        for _ in self._pool.map(lambda at: np.copyto(into[at : at + step], source[at : at + step]), starts):
            pass

    def copy(self) -> None:
        """All of it into memory that was touched before."""
        self._copy(self._into, self._map)

    def copy_fresh(self) -> None:
        """The states into new memory, as a restore without a buffer hands them out."""
        self._copy(self._into[: self._cut], self._map[: self._cut])
        states = np.empty(self._map.size - self._cut, np.uint8)
        self._copy(states, self._map[self._cut :])


@dataclass(slots=True)
class _Restoring:
    """The candidate, and how long its parts took."""

    namespace: Namespace
    prompt: Array
    into: dict[str, Array]
    leased: list[float]
    rows: list[float]
    states: list[float]
    buffer: npt.NDArray[np.uint8]

    def restore(self) -> dict[str, Array]:
        """Into arrays and a buffer that are there, as an engine keeps them."""
        start = time.perf_counter()
        with self.namespace.lease(self.prompt) as lease:
            leased = time.perf_counter()
            if lease.length != self.prompt.size:
                raise AssertionError(f"a lease of {lease.length} tokens, expected {self.prompt.size}")
            lease.copy_into(self.into, threads=_THREADS)
            copied = time.perf_counter()
            if self.buffer.size < lease.states_bytes:
                self.buffer = np.ones(lease.states_bytes, np.uint8)
            states = lease.states(into=self.buffer)
            self.states.append(time.perf_counter() - copied)
        self.leased.append(leased - start)
        self.rows.append(copied - leased)
        return states

    def timed(self) -> None:
        """Restore, and let go of the states."""
        self.restore()

    def fresh(self) -> None:
        """Restore with the states in new memory."""
        with self.namespace.lease(self.prompt) as lease:
            lease.copy_into(self.into, threads=_THREADS)
            lease.states()


def _counted(times: list[float], side: Callable[[], None]) -> Callable[[], None]:
    """A side that notes the processor time of all its threads, which holds on a busy machine too."""

    def run() -> None:
        start = time.process_time()
        side()
        times.append(time.process_time() - start)

    return run


def _same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and np.array_equal(one[name].view(np.uint8), other[name].view(np.uint8))
        for name in one
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """One length and model."""

    tokens: int
    states: int
    total: int
    seconds: Seconds
    processor: Seconds
    parts: _Restoring

    @property
    def beside(self) -> list[float]:
        """Milliseconds of each round beside the plain copy."""
        return [1e3 * (k - p) for k, p in zip(self.seconds["kvstore"], self.seconds["plain"], strict=True)]

    @property
    def ratio(self) -> float:
        return median([k / p for k, p in zip(self.seconds["kvstore"], self.seconds["plain"], strict=True)])

    def record(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "states_bytes": self.states,
            "bytes": self.total,
            "beside_ms": {f"p{q}": quantile(self.beside, q / 100) for q in (50, 90, 99)},
            "ratio": self.ratio,
            "lease_ms": 1e3 * median(self.parts.leased),
            "rows_ms": 1e3 * median(self.parts.rows),
            "states_ms": 1e3 * median(self.parts.states),
            "processor_ms": {side: 1e3 * median(taken) for side, taken in self.processor.items()},
            "seconds": self.seconds,
        }

    def line(self) -> str:
        ms = {side: 1e3 * median(taken) for side, taken in self.seconds.items()}
        return (
            f"{self.tokens:6,} tokens, {self.states / 1e6:5.1f} of {self.total / 1e6:5.1f} MB are states: {ms['kvstore']:.2f} ms, "
            f"plain copy {ms['plain']:.2f} (with states in new memory {ms['kvstore fresh']:.2f} and "
            f"{ms['fresh']:.2f}); beside it {median(self.beside):.2f} ms "
            f"(p99 {quantile(self.beside, 0.99):.2f})"
        )


def _restoring(context: Context, model: Hybrid, tokens: int) -> _Case:
    directory = context.scratch / f"store-{model.heads}-{tokens}"
    context.say(f"saving {tokens:,} tokens of a model of {model.heads} recurrent heads")
    engine = HybridEngine(model, tokens)
    engine.compute(tokens, seed=tokens)
    size = bytes_of(engine.states)
    arrays = {**engine.streams, **engine.states}
    total = bytes_of(arrays)
    prompt = random_tokens(tokens, tokens)
    plain_path = context.scratch / "plain"
    with ThreadPoolExecutor(_THREADS) as pool, Store.open(directory, max_bytes=2 * total + (256 << 20)) as store:
        namespace = store.namespace(engine.layout())
        namespace.save(prompt, engine.streams, states=engine.states)
        plain = _Plain(plain_path, arrays, size, pool)
        restoring = _Restoring(namespace, prompt, touched(engine.layout(), tokens), [], [], [], np.empty(0, np.uint8))
        if not (_same(restoring.restore(), engine.states) and _same(restoring.into, engine.streams)):
            raise AssertionError("what was restored is not what was saved")
        plain.copy()
        for times in (restoring.leased, restoring.rows, restoring.states):
            times.clear()
        processor: Seconds = {}
        sides = {
            name: _counted(processor.setdefault(name, []), side)
            for name, side in {
                "plain": plain.copy,
                "fresh": plain.copy_fresh,
                "kvstore": restoring.timed,
                "kvstore fresh": restoring.fresh,
            }.items()
        }
        seconds = pairs(context, f"{tokens:,} tokens, {size / 1e6:.0f} MB of states", _SIZES[context.size].rounds, sides)
    shutil.rmtree(directory)
    plain_path.unlink()
    return _Case(tokens, size, total, seconds, processor, restoring)


def _show_restores(outcome: Outcome, cases: list[_Case]) -> None:
    outcome.figures["restores"] = [case.record() for case in cases]
    outcome.lines += [case.line() for case in cases]
    rows: list[tuple[Cell, ...]] = [
        (
            f"{case.tokens:,}",
            f"{case.states / 1e6:.1f}",
            case.total / 1e6,
            *(1e3 * quantile(case.seconds["kvstore"], q) for q in (0.5, 0.9, 0.99)),
            1e3 * median(case.seconds["plain"]),
            *(quantile(case.beside, q) for q in (0.5, 0.9, 0.99)),
            case.ratio,
        )
        for case in cases
    ]
    heads = ("tokens", "states, MB", "all, MB", "restore p50, ms", "p90", "p99", "plain copy p50, ms")
    parts: list[tuple[Cell, ...]] = [
        (
            f"{case.tokens:,}",
            f"{case.states / 1e6:.1f}",
            *(1e3 * median(taken) for taken in (case.parts.leased, case.parts.rows, case.parts.states)),
            1e3 * median([f - p for f, p in zip(case.seconds["kvstore fresh"], case.seconds["fresh"], strict=True)]),
            *(1e3 * median(case.processor[side]) for side in ("kvstore", "plain")),
            median([k / p for k, p in zip(case.processor["kvstore"], case.processor["plain"], strict=True)]),
        )
        for case in cases
    ]
    outcome.tables += [
        Table(
            "A hybrid session from the page cache, every byte checked",
            (*heads, "beside it p50, ms", "beside it p90", "beside it p99", "times of the plain copy"),
            tuple(rows),
            "Beside it is the difference of the two in the same round; below zero the restore is faster. A ratio above 1 says that "
            f"the restore takes longer. {_THREADS} threads on each side.",
        ),
        Table(
            "Where the time goes",
            (
                "tokens",
                "states, MB",
                "lease, ms",
                "rows, ms",
                "states, ms",
                "beside the copy with states in new memory, both: ms",
                "processor ms: restore",
                "processor ms: plain copy",
                "processor time, times of the plain copy",
            ),
            tuple(parts),
            "The states go into a buffer that the engine keeps (`lease.states(into=...)`). Without one they are handed out in new "
            "memory, whose pages the system has to make; then the plain copy is one whose states go into new memory, too. "
            "Processor time is that of all threads together; it holds on a busy machine too.",
        ),
    ]
    by_states: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        by_states.setdefault(f"restore, {case.states / 1e6:.0f} MB of states", []).append(
            (case.tokens, 1e3 * median(case.seconds["kvstore"]))
        )
        by_states.setdefault(f"plain copy, {case.states / 1e6:.0f} MB of states", []).append(
            (case.tokens, 1e3 * median(case.seconds["plain"]))
        )
    outcome.plots.append(Plot("restore", "Restoring a hybrid session", "tokens", "ms, median", by_states, log_x=True))
    worst = max(median(case.beside) for case in cases)
    outcome.targets.append(Target("restoring a hybrid session, beside the plain copy of its bytes: ms", worst, _LIMIT_MS))


def _show_talks(outcome: Outcome, talks: list[Kept]) -> None:
    outcome.figures["conversations"] = [kept.record() for kept in talks]
    outcome.lines += [kept.line() for kept in talks]
    outcome.tables += [
        Table(
            f"What checkpoints take on disk after {talks[0].turns} turns",
            (
                "the client",
                "a checkpoint, MB",
                "checkpoints saved",
                "kept",
                "states on disk, MB",
                "ratio to one checkpoint",
                "ratio to keeping all",
                "rows on disk, MB",
                "file, MB",
            ),
            tuple(
                (
                    kept.client,
                    f"{kept.checkpoint / 1e6:.1f}",
                    kept.saved,
                    kept.kept,
                    kept.states_bytes / 1e6,
                    kept.states_bytes / kept.checkpoint,
                    kept.states_bytes / kept.all_bytes,
                    kept.rows_bytes / 1e6,
                    kept.file_bytes / 1e6,
                )
                for kept in talks
            ),
            "Two checkpoints a turn: at its boundary, and at the end of the answer. A path keeps its two deepest, and the one at a "
            "point where others branch off. A client that sends the reasoning back has one path. One that hides it comes back to "
            "the boundary and leaves the answer as it was decoded; the tier drops it once the next turn is stored.",
        ),
        Table(
            "A cascade with states",
            (
                "the client",
                "states, MB",
                "returns p50, ms",
                "p90",
                "p99",
                "durable p50, ms",
                "durable p90",
                "durable p99",
                "plain writes p50, ms",
                "speed, of plain writes",
                "written, of what is new",
            ),
            tuple(
                (
                    kept.client,
                    f"{kept.checkpoint / 1e6:.1f}",
                    *(1e3 * quantile(kept.returned, q) for q in (0.5, 0.9, 0.99)),
                    *(1e3 * quantile(kept.durable, q) for q in (0.5, 0.9, 0.99)),
                    1e3 * median(kept.plain),
                    median([p / d for p, d in zip(kept.plain, kept.durable, strict=True)]),
                    kept.handed / kept.new,
                )
                for kept in talks
            ),
            "But for the first cascade, which makes the store's index. Plain writes are of the new rows and all states to a new "
            "file, with fdatasync every 8 MiB. What is new: the same bytes; written beside them: the block in which the last "
            "cascade ended, and the index.",
        ),
    ]
    outcome.targets += [
        Target("checkpoints kept of a conversation", max(k.kept for k in talks), _KEPT),
        Target(
            "bytes of the checkpoints kept of it, over those of one",
            max(k.states_bytes / k.checkpoint for k in talks),
            1.05 * _KEPT,
        ),
    ]


def _run(context: Context) -> Outcome:
    plan, outcome = _SIZES[context.size], context.outcome
    cases = [_restoring(context, model, tokens) for model in plan.models for tokens in plan.lengths]
    _show_restores(outcome, cases)
    os.sync()
    talks = [talk(context, plan.talk, model, branches=False) for model in plan.models]
    talks.append(talk(context, plan.talk, plan.models[0], branches=True))
    _show_talks(outcome, talks)
    return outcome


_METHOD = """\
A model with 12 layers of attention (K and V in int8 with scales in f16, 12.4 KB a token), 12 streams of pooled index keys (a row
for 64 tokens), 36 recurrent layers with states and the history of their convolutions, and a window of 512 positions. A session is
saved; then restoring it from the page cache (a lease, `copy_into` of all streams into arrays that are there, `states` into a
buffer that is there) takes turns with a copy of as many bytes in one run, out of a map of a plain file, into memory that was
touched before: nothing could be simpler. Then a conversation grows turn by turn, each promoted, and cascaded at its boundary and
at the end of its answer; beside each cascade the same new bytes are written plainly; which of the two comes first alternates."""

BENCH = Bench(
    "hybrid",
    "sessions of attention rows and 10 to 80 MB of recurrent states: restored, cascaded, and on disk",
    _needs,
    _run,
    _METHOD,
    """\
What a restore takes beside the copy is the lease and the sums of all bytes. Sums cost little where the processor computes them
much faster than it copies; the benchmark `limits` has both speeds. A cascade is a transaction that hashes and sums what it
writes; states that don't fit into one of 48 MiB follow in several, each with a sync.""",
)
