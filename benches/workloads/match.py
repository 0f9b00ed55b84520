"""match: how long it takes to find the longest stored prefix of a long prompt, among many sessions."""

from __future__ import annotations

import shutil
import time

import numpy as np
import numpy.typing as npt

from benches.harness import Bench, Context, Needs, Outcome, Size, Target, median, quantile
from benches.sessions import Array, random_tokens, small_layout
from kvstore import Namespace, Store

__all__ = ["BENCH"]

Prompt = npt.NDArray[np.uint32]

_PREFIXES, _SHARED, _SESSION = 10, 1000, 2000
_LIMIT_MS, _LIMIT_GROWTH = 1.0, 2.0
# (long prompt, sessions in the smaller store and in the larger one, calls)
_SIZES: dict[Size, tuple[int, int, int, int]] = {
    "full": (100_000, 1000, 10_000, 2000),
    "quick": (100_000, 100, 1000, 1000),
    "smallest": (6000, 10, 30, 50),
}


def _needs(size: Size) -> Needs:
    _, few, many, _ = _SIZES[size]
    return Needs(disk=(few + many) * (1 << 18) + (256 << 20), memory=1 << 30)


def _session(number: int) -> Prompt:
    prefix = random_tokens(10_000_000 + number % _PREFIXES, _SHARED)
    return np.concatenate([prefix, random_tokens(number, _SESSION - _SHARED)])


def _save(namespace: Namespace, tokens: Prompt) -> None:
    arrays: dict[str, Array] = {}
    for stream in namespace.layout.streams:
        # the tokens stand in the rows, so that no two sessions share a block by accident
        rows = np.zeros(stream.array_shape(tokens.size), np.uint8)
        rows[:, :4] = tokens.view(np.uint8).reshape(-1, 4)
        arrays[stream.name] = rows
    namespace.save(tokens, arrays)


def _fill(context: Context, namespace: Namespace, sessions: int, long: Prompt) -> None:
    began = time.perf_counter()
    for number in range(sessions):
        if number == sessions // 2:
            _save(namespace, long)
        _save(namespace, _session(number))
        if number % 500 == 499:
            left = (time.perf_counter() - began) / (number + 1) * (sessions - number - 1)
            context.say(f"saving sessions: {number + 1} of {sessions}, about {left:.0f} s left")


def _time(context: Context, namespaces: dict[int, Namespace], prompt: Prompt, expected: int, calls: int) -> dict[int, list[float]]:
    """Milliseconds of each call. The stores take turns."""
    for namespace in namespaces.values():
        match = namespace.match(prompt)
        if (match.length if match else 0) != expected:
            raise AssertionError(f"a match of {match}, expected {expected}")
    times: dict[int, list[float]] = {sessions: [] for sessions in namespaces}
    clock = time.perf_counter
    for _ in range(calls):
        for sessions, namespace in namespaces.items():
            start = clock()
            namespace.match(prompt)
            times[sessions].append((clock() - start) * 1e3)
    return times


def _run(context: Context) -> Outcome:
    length, few, many, calls = _SIZES[context.size]
    long = random_tokens(99, length)
    layout = small_layout()
    stores: dict[int, Store] = {}
    outcome = Outcome()
    try:
        namespaces = {}
        for sessions in (few, many):
            path = context.scratch / f"store{sessions}"
            stores[sessions] = Store.open(path, max_bytes=max(sessions * (1 << 18) * 2, 512 << 20))
            namespaces[sessions] = stores[sessions].namespace(layout)
            _fill(context, namespaces[sessions], sessions, long)
        divergent = long.copy()
        divergent[length // 2 + 100] += 1
        prompts = {
            "long": (long, length),
            "long_divergent": (divergent, length // 2 + 100),
            "session": (_session(3), _SESSION),
            "miss": (random_tokens(77, length), 0),
        }
        for name, (prompt, expected) in prompts.items():
            context.say(f"matching: {name}")
            times = _time(context, namespaces, prompt, expected, calls)
            medians = {sessions: median(t) for sessions, t in times.items()}
            growth = medians[many] / medians[few]
            outcome.figures[name] = {
                "prompt_tokens": int(prompt.size),
                "matched_tokens": expected,
                "calls": calls,
                "growth": growth,
                "ms": {
                    str(sessions): {"p50": median(t), "p90": quantile(t, 0.9), "p99": quantile(t, 0.99)}
                    for sessions, t in times.items()
                },
            }
            row = "; ".join(f"{n} sessions p50 {medians[n]:.3f} ms, p99 {quantile(t, 0.99):.3f} ms" for n, t in times.items())
            outcome.lines.append(f"{name} ({prompt.size} tokens, {expected} matched): {row}; ratio {growth:.2f}")
            if name == "long":
                outcome.targets = [
                    Target(f"median at {few} sessions, ms", medians[few], _LIMIT_MS),
                    Target(f"median at {many} sessions over that at {few}", growth, _LIMIT_GROWTH),
                ]
    finally:
        for store in stores.values():
            store.close()
        for path in context.scratch.glob("store*"):
            shutil.rmtree(path, ignore_errors=True)
    return outcome


BENCH = Bench("match", "find the longest stored prefix of a 100,000-token prompt among 1,000 and 10,000 sessions", _needs, _run)
