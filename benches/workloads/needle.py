"""needle: the demo's round robin with the real model at several lengths: time to first token, restored against read anew."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benches.demo.children import DemoError
from benches.demo.prompts import SHORTEST
from benches.demo.text import STORIES
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Target, Unavailable, median, quantile
from benches.llamacpp import DriverError, smollm2_path
from kvstore.errors import KVStoreError

if TYPE_CHECKING:  # they need rich, which no other workload does
    from benches.demo.run import Run, Turn

__all__ = ["BENCH"]

_EVERY = 5.0  # seconds between lines of progress within a prompt
_ROW_BYTES = 24 << 10  # of a token of this model, about
# (tokens of the first prompts, users)
_SIZES: dict[Size, tuple[tuple[int, ...], int]] = {
    "full": ((1000, 2000, 4000), 3),
    "quick": ((1000,), 3),
    "smallest": ((SHORTEST,), 2),
}


def _needs(size: Size) -> Needs:
    lengths, users = _SIZES[size]
    rows = (max(lengths) + 512) * _ROW_BYTES
    return Needs(disk=2 * users * rows + (256 << 20), memory=(users + 4) * rows + (2 << 30))


class _Screen:
    """Where the demo's scenario says what it does."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def say(self, text: str) -> None:
        from rich.text import Text

        self._say(Text.from_markup(text).plain)

    @contextmanager
    def reading(self, what: str) -> Iterator[Callable[[int, int], None]]:
        began = said = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if 0 < done < total and now - said > _EVERY:
                said = now
                self._say(f"{what}: {done} read, about {(now - began) / done * (total - done):.0f} s left")

        yield tick


def _measure(context: Context, length: int, users: int) -> tuple[Run, list[str]]:
    """Run the scenario at one length; also every reason why it does not show what it is to show."""
    from benches.demo.run import run
    from benches.demo.verdict import failures

    store = context.scratch / "store"
    try:
        found = run(STORIES[:users], length, store, _Screen(context.say))
    except (DemoError, KVStoreError) as error:
        raise Unavailable(f"the scenario at {length} tokens could not be carried out: {error}") from error
    finally:
        shutil.rmtree(store, ignore_errors=True)
    return found, failures(found)


def _times(turns: list[Turn]) -> dict[str, Any]:
    restored = [turn.served["ttft"] for turn in turns]
    cold = [turn.cold for turn in turns]
    return {
        "turns": len(turns),
        "ttft_seconds": restored,
        "cold_seconds": cold,
        "restore_seconds": [turn.served["restore"] for turn in turns],
        "reused_tokens": [turn.served["reused"] for turn in turns],
        "tokens": [len(turn.tokens) for turn in turns],
        "ratio": median([other / own for other, own in zip(cold, restored, strict=True)]),
    }


def _run(context: Context) -> Outcome:
    lengths, users = _SIZES[context.size]
    try:
        smollm2_path()
    except DriverError as error:
        raise Unavailable(str(error)) from error
    outcome = context.outcome
    outcome.figures["lengths"] = {}
    rows: list[tuple[Any, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {"promoted": [], "read from position 0": []}
    wrong: list[str] = []
    for place, length in enumerate(lengths):
        context.say(f"length {place + 1} of {len(lengths)}: {length} tokens")
        found, reasons = _measure(context, length, users)
        wrong += [f"{length} tokens: {reason}" for reason in reasons]
        promoted = [turn for turn in found.turns if turn.promoted]
        times = _times(promoted)
        needles = sum(turn.needle in turn.served["text"] for turn in found.turns)
        outcome.figures["lengths"][str(length)] = {
            **times,
            "needles_found": needles,
            "failures": reasons,
            "shared_tokens": found.shared,
            "store": found.store,
        }
        restored, cold = times["ttft_seconds"], times["cold_seconds"]
        rows.append(
            (
                length,
                len(promoted),
                median([t / n for t, n in zip(times["reused_tokens"], times["tokens"], strict=True)]),
                *(quantile(restored, q) for q in (0.5, 0.9, 0.99)),
                median(times["restore_seconds"]) * 1e3,
                *(quantile(cold, q) for q in (0.5, 0.9, 0.99)),
                times["ratio"],
                not reasons,
            )
        )
        lines["promoted"].append((length, median(restored)))
        lines["read from position 0"].append((length, median(cold)))
        outcome.lines.append(
            f"{length} tokens: first token after {median(restored):.3f} s promoted, {median(cold):.2f} s cold "
            f"({times['ratio']:.1f} times as long); the restore itself {median(times['restore_seconds']) * 1e3:.1f} ms; {needles} "
            f"of {len(found.turns)} needles "
            "found; " + ("every turn equal to the uninterrupted one" if not reasons else f"{len(reasons)} FAILURES")
        )
    outcome.lines += wrong
    outcome.tables = [
        Table(
            "Time to first token of a later turn, SmolLM2-135M, seconds",
            (
                "tokens of the first prompt",
                "turns",
                "restored, of the prompt",
                "promoted, p50",
                "p90",
                "p99",
                "the restore, ms",
                "cold, p50",
                "p90",
                "p99",
                "cold, of promoted",
                "bit-equal",
            ),
            tuple(rows),
            f"{users} users in turn, each turn promoted from the store, after restarts and after the others' turns. Cold is the "
            "same prompt read from position 0 in a process without a store. Bit-equal: answers, whole states and first logits are "
            "those of an engine that was never interrupted, and a damaged block was refused.",
        )
    ]
    outcome.plots = [
        Plot("ttft", "Time to first token of a later turn", "tokens of the first prompt", "seconds", lines, log_y=True)
    ]
    outcome.targets = [Target("turns or checks that are not as they must be", len(wrong), 0)]
    return outcome


BENCH = Bench(
    "needle",
    "three users in rotation over restarts, with the real model, at several lengths: time to first token",
    _needs,
    _run,
    "The scenario of `make demo`: a server process takes each prompt cold and cascades; a second and a third one promote each "
    "later turn; an engine without a store, never interrupted, says what every answer, state and logit has to be.",
    apart=True,
)
