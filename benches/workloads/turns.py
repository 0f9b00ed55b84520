"""turns: a conversation that grows turn by turn: what each cascade and each promote takes, against the bytes that are new."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benches.children import Worker
from benches.engine import ArrayEngine
from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, median, quantile
from benches.promoting import digest_of
from benches.sessions import TOKEN_BYTES, Array, arrays_for, large_layout, random_tokens
from benches.written import written
from kvstore import SessionTier, Store

__all__ = ["BENCH"]

_SEED = 11
_PIECE = 8 << 20
# (first tokens, last tokens, turns)
_SIZES: dict[Size, tuple[int, int, int]] = {
    "full": (2000, 100_000, 50),
    "quick": (2000, 16_000, 8),
    "smallest": (600, 1500, 3),
}


def _needs(size: Size) -> Needs:
    total = _SIZES[size][1] * TOKEN_BYTES
    return Needs(disk=int(2.3 * total) + (256 << 20), memory=4 * total + (512 << 20))


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn: bytes, and times in seconds."""

    tokens: int
    new_bytes: int
    tail_bytes: int
    handed_bytes: int
    cascade: float
    durable: float
    plain_write: float
    opening: float
    promote: float
    plain_read: float

    @property
    def whole_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    def record(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


class _Conversation:
    """A conversation, saved turn by turn into a store and, for comparison, appended to a plain file."""

    def __init__(self, tier: SessionTier, plain: Path, prompt: Array, arrays: dict[str, Array]) -> None:
        self._tier, self._plain, self._prompt, self._arrays = tier, plain, prompt, arrays

    def turn(self, store: Path, before: int, length: int, *, plain_first: bool) -> _Turn:
        """Cascade a turn and let a new process promote it."""
        plain = self._append(before, length) if plain_first else 0.0
        os.sync()
        handed, start = written()[1], time.perf_counter()
        result = self._tier.cascade(self._prompt[:length])
        returned = time.perf_counter()
        self._tier.flush()
        durable = time.perf_counter()
        handed = written()[1] - handed
        if result.missed or result.stored_tokens != before:
            raise AssertionError(f"the turn to {length} tokens: {result}")
        plain = plain or self._append(before, length)
        with Worker("benches.promoting") as child:
            child.ask("prepare", capacity=length, sessions=[_SEED], tokens=self._prompt.size)
            read = child.ask("read", path=str(self._plain), length=length)["seconds"] if plain_first else 0.0
            opening = child.ask("open", path=str(store))["seconds"]
            promote = child.ask("promote", seed=_SEED, tokens=self._prompt.size, length=length)["seconds"]
            if length == self._prompt.size and child.ask("digest", length=length)["digest"] != digest_of(self._arrays, length):
                raise AssertionError("what was promoted is not what was cascaded")
            read = read or child.ask("read", path=str(self._plain), length=length)["seconds"]
            child.ask("close")
        new = (length - before) * TOKEN_BYTES
        tail = before % self._tier.namespace.layout.block_tokens * TOKEN_BYTES
        return _Turn(length, new, tail, handed, returned - start, durable - start, plain, opening, promote, read)

    def _append(self, before: int, length: int) -> float:
        """Seconds of writing the new rows to the plain file, durably, in pieces."""
        parts = [np.ascontiguousarray(array[before:length]).reshape(-1).view(np.uint8) for array in self._arrays.values()]
        rows = np.concatenate(parts).data
        os.sync()
        start = time.perf_counter()
        with self._plain.open("ab", buffering=0) as file:
            for at in range(0, len(rows), _PIECE):
                file.write(rows[at : at + _PIECE])
                os.fdatasync(file.fileno())
        return time.perf_counter() - start


def _run(context: Context) -> Outcome:
    first, last, count = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(_SEED, last)
    context.say(f"making {last * TOKEN_BYTES / 1e9:.2f} GB of rows")
    arrays = arrays_for(layout, last)
    lengths = [round(first + (last - first) * n / (count - 1)) for n in range(count)]
    path = context.scratch / "store"
    turns: list[_Turn] = []
    began = time.perf_counter()
    with (
        Store.open(path, max_bytes=int(1.25 * last * TOKEN_BYTES) + (128 << 20)) as store,
        SessionTier(store, ArrayEngine(layout, arrays)) as tier,
    ):
        conversation = _Conversation(tier, context.scratch / "plain", prompt, arrays)
        for place, (before, length) in enumerate(zip([0, *lengths], lengths, strict=False)):
            turns.append(conversation.turn(path, before, length, plain_first=place % 2 == 1))
            left = (time.perf_counter() - began) / (place + 1) * (count - place - 1)
            context.say(f"turn {place + 1} of {count}: {length} tokens" + (f", about {left:.0f} s left" if left >= 1 else ""))
        stats = store.stats()
    outcome = context.outcome
    outcome.figures |= {
        "token_bytes": TOKEN_BYTES,
        "block_tokens": layout.block_tokens,
        "file_bytes": stats.file_bytes,
        "live_bytes": stats.live_bytes,
        "turns": [turn.record() for turn in turns],
    }
    _describe(outcome, turns)
    return outcome


def _describe(outcome: Outcome, turns: list[_Turn]) -> None:
    new, handed = sum(t.new_bytes for t in turns), sum(t.handed_bytes for t in turns)
    whole, tails = sum(t.whole_bytes for t in turns), sum(t.tail_bytes for t in turns)
    later = turns[1:] or turns  # the first one makes the store's index, and is larger
    durable, plain = [t.durable for t in later], [t.plain_write for t in later]
    ratio = median([p / d for p, d in zip(plain, durable, strict=True)])
    read = median([t.plain_read / t.promote for t in later])
    outcome.lines = [
        f"written {handed / 1e9:.3f} GB for {new / 1e9:.3f} GB of new rows ({handed / new:.3f}) and {tails / 1e9:.3f} GB of tails; "
        f"writing every turn whole would be {whole / 1e9:.1f} GB ({whole / new:.1f})",
        f"cascade, median: returns after {median([t.cascade for t in later]) * 1e3:.1f} ms, durable after "
        f"{median(durable) * 1e3:.1f} ms, p99 {quantile(durable, 0.99) * 1e3:.1f} ms; plain writes {median(plain) * 1e3:.1f} ms; "
        f"{ratio:.2f} of their speed",
        f"promote in a new process: last turn {turns[-1].promote * 1e3:.1f} ms for {turns[-1].whole_bytes / 1e9:.2f} GB, plain "
        f"reads {turns[-1].plain_read * 1e3:.1f} ms; {read:.2f} of their speed, the median of all turns; opening "
        f"{median([t.opening for t in turns]) * 1e3:.1f} ms",
    ]
    shown = turns if len(turns) <= 12 else [turns[n] for n in sorted({*range(0, len(turns), 7), 9, len(turns) - 1})]
    rows: list[tuple[Any, ...]] = [
        (
            turns.index(t) + 1,
            t.tokens,
            t.new_bytes / 2**20,
            t.tail_bytes / 2**20,
            t.handed_bytes / 2**20,
            t.handed_bytes / (t.new_bytes + t.tail_bytes),
            t.cascade * 1e3,
            t.durable * 1e3,
            t.plain_write * 1e3,
            t.plain_write / t.durable,
            t.promote * 1e3,
            t.plain_read * 1e3,
            t.plain_read / t.promote,
        )
        for t in shown
    ]
    outcome.tables = [
        Table(
            "Turns of a growing conversation, 16 KiB a token",
            (
                "turn",
                "tokens",
                "new, MiB",
                "rewritten tail, MiB",
                "written, MiB",
                "written, of new and tail",
                "cascade returns, ms",
                "durable, ms",
                "plain writes, ms",
                "speed of a cascade, of plain writes",
                "promote, ms",
                "plain reads, ms",
                "speed of a promote, of plain reads",
            ),
            tuple(rows),
            "Written is what the process handed to write calls, the index included. The block in which the last turn ended is "
            "written anew. Plain writes append the new rows to a file, with fdatasync every 8 MiB. A promote is the first one of a "
            "new process; plain reads bring as many bytes from the page cache into the same arrays with two threads, and check "
            "nothing.",
        ),
        Table(
            "All turns together",
            ("", "p50, ms", "p90, ms", "p99, ms", "of plain writes or reads"),
            (
                _row("cascade returns", [t.cascade for t in later], plain),
                _row("cascade durable", durable, plain),
                _row("plain writes", plain, plain),
                _row("promote", [t.promote for t in later], [t.plain_read for t in later]),
                _row("plain reads", [t.plain_read for t in later], [t.plain_read for t in later]),
            ),
            "But for the first turn, which is saved into an empty store. The last column is the median ratio of the times, turn by "
            "turn.",
        ),
    ]
    points: dict[str, list[tuple[float, float]]] = {
        "cascade, until durable": [(t.tokens, t.durable * 1e3) for t in later],
        "cascade, until it returns": [(t.tokens, t.cascade * 1e3) for t in later],
        "plain writes of the new rows": [(t.tokens, t.plain_write * 1e3) for t in later],
        "promote in a new process": [(t.tokens, t.promote * 1e3) for t in later],
    }
    outcome.plots = [
        Plot("times", "A growing conversation: each turn's cascade and promote", "tokens so far", "ms", points, log_y=True)
    ]


def _row(name: str, seconds: list[float], limit: list[float]) -> tuple[Any, ...]:
    ratio = median([own / other for own, other in zip(seconds, limit, strict=True)])
    return (name, *(quantile(seconds, q) * 1e3 for q in (0.5, 0.9, 0.99)), ratio)


BENCH = Bench(
    "turns",
    "a conversation of 2,000 to 100,000 tokens in 50 turns: bytes written, time of each cascade and promote",
    _needs,
    _run,
    "One tier cascades each turn (until it returns, and until `flush` says that it is durable). After each turn a new process "
    "opens the store and promotes the whole conversation into arrays. Beside it the new rows are appended to a plain file with "
    "fdatasync, and the new process reads that file; which of the two comes first alternates.",
    "A cascade writes the block anew in which the last turn ended, hashes and sums what it writes, and is a transaction with two\n"
    "syncs, of the data and then of the page that makes it valid; appending to a file is neither atomic nor checked. The shorter\n"
    "a turn, the more that counts. A promote in a new process meets the pages of the store's map for the first time, and finds\n"
    "and checks what it copies, where a plain read does neither.",
)
