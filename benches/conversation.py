"""A conversation with a hybrid model, turn by turn: what its cascades take, and what its checkpoints take on disk."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benches.harness import Context, median, quantile
from benches.hybrids import Hybrid, HybridEngine
from benches.sessions import Array, bytes_of, random_tokens
from benches.written import written
from kvstore import SessionTier, Store

__all__ = ["Conversation", "Kept", "room", "talk"]

_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """How long it is, in tokens: its first prompt, then a turn's prompt, hidden reasoning and answer; and how many turns."""

    first: int
    user: int
    hidden: int
    answer: int
    turns: int

    @property
    def longest(self) -> int:
        """The most tokens that it comes to."""
        return self.first + self.turns * (self.user + self.hidden + self.answer)


@dataclass(slots=True)
class Kept:
    """What was measured. Times are in seconds, one for each cascade but the first.

    Attributes
    ----------
    client : str
        What it sends back.
    branches : bool
        Whether its turns branch off.
    turns : int
    checkpoint, all_bytes : int
        Bytes of the states of the last checkpoint, and of all that were saved.
    saved, kept : int
        Checkpoints.
    states_bytes, rows_bytes, file_bytes : int
        What the store holds in the end.
    new, handed : int
        Bytes that were new, and bytes handed to write calls.
    returned, durable, plain : list of float
        Until the cascade returned, until it was durable; plain writes of the same new bytes.
    """

    client: str
    branches: bool
    turns: int
    checkpoint: int = 0
    all_bytes: int = 0
    saved: int = 0
    kept: int = 0
    states_bytes: int = 0
    rows_bytes: int = 0
    file_bytes: int = 0
    new: int = 0
    handed: int = 0
    returned: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As it goes into the JSON file."""
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        """As a person reads it."""
        return (
            f"a client that {self.client}: {self.kept} of {self.saved} checkpoints kept, {self.states_bytes / 1e6:.1f} MB, "
            f"{self.states_bytes / self.checkpoint:.2f} times one; cascade returns after {1e3 * median(self.returned):.1f} ms, "
            f"durable after {1e3 * median(self.durable):.1f} ms (p99 {1e3 * quantile(self.durable, 0.99):.1f}), plain writes "
            f"{1e3 * median(self.plain):.1f} ms"
        )


class _Talk:
    """One conversation on one store."""

    def __init__(self, tier: SessionTier, engine: HybridEngine, plain: Path, kept: Kept) -> None:
        self._tier, self._engine, self._plain, self.kept = tier, engine, plain, kept
        self.prompts: list[Array] = []

    def read(self, prompt: Array, expected: int) -> None:
        """Promote a prompt, let the model read the rest of it, and cascade."""
        reused = self._tier.promote(prompt)
        if reused != expected:
            raise AssertionError(f"promoted {reused} tokens, expected {expected}")
        self.cascade(prompt)

    def cascade(self, prompt: Array) -> None:
        """Let the model come to the prompt's end, then save what is new."""
        kept, engine = self.kept, self._engine
        number = len(self.prompts)
        before = engine.position
        rows = engine.compute(prompt.size, seed=number + 1)
        states = bytes_of(engine.states)
        plain = self._write(before, prompt.size) if number % 2 else 0.0
        os.sync()
        handed, start = written()[1], time.perf_counter()
        result = self._tier.cascade(prompt)
        returned = time.perf_counter()
        self._tier.flush()
        durable = time.perf_counter()
        handed = written()[1] - handed
        if result.missed or result.stored_tokens != before or self._tier.stats.save_misses:
            what = result.missed or f"{result.stored_tokens} tokens were stored before, {self._tier.stats.save_misses} saves missed"
            raise AssertionError(f"a cascade of {prompt.size} tokens was to add to {before}: {what}")
        plain = plain or self._write(before, prompt.size)
        kept.saved += 1
        kept.all_bytes += states
        kept.checkpoint = states
        self.prompts.append(prompt)
        if number:
            kept.returned.append(returned - start)
            kept.durable.append(durable - start)
            kept.plain.append(plain)
            kept.new += rows + states
            kept.handed += handed

    def _write(self, before: int, length: int) -> float:
        """Seconds of writing the same new bytes to a new file, durably, in pieces."""
        streams = self._engine.layout().streams
        parts = [self._engine.streams[s.name][s.rows(before) : s.rows(length)] for s in streams]
        flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (*parts, *self._engine.states.values())]
        data = np.concatenate(flat).data
        os.sync()
        start = time.perf_counter()
        with self._plain.open("wb", buffering=0) as file:
            for at in range(0, len(data), _PIECE):
                file.write(data[at : at + _PIECE])
                os.fdatasync(file.fileno())
            seconds = time.perf_counter() - start
        self._plain.unlink()
        return seconds

    def account(self, store: Store) -> None:
        """Take what the store holds."""
        (info,) = store.namespaces()
        self.kept.kept = info.checkpoints
        self.kept.rows_bytes, self.kept.states_bytes = info.rows_bytes, info.states_bytes
        self.kept.file_bytes = store.stats().file_bytes


def room(plan: Conversation, model: Hybrid, *, branches: bool) -> int:
    """Bytes of a store that such a conversation fits into."""
    states = sum(state.max_bytes for state in model.layout().states)
    rows = int(model.layout().token_bytes * plan.longest)
    return int(1.5 * ((2 * plan.turns if branches else 4) * states + (3 if branches else 1) * rows)) + (128 << 20)


def talk(context: Context, plan: Conversation, model: Hybrid, *, branches: bool) -> Kept:
    """Hold a conversation in which the client sends the reasoning back, or hides it, so that each turn leaves its answer."""
    kept = Kept("hides the reasoning" if branches else "sends all back", branches, plan.turns)
    directory = context.scratch / "talk"
    cap = room(plan, model, branches=branches)
    engine = HybridEngine(model, plan.longest)
    with Store.open(directory, max_bytes=cap) as store, SessionTier(store, engine) as tier:
        one = _Talk(tier, engine, context.scratch / "plain", kept)
        sent, boundary, seed, began = random_tokens(1, plan.first), 0, 1, time.perf_counter()
        for turn in range(plan.turns):
            prompt = np.concatenate([sent, random_tokens(seed + 1, plan.user)])
            one.read(prompt, boundary if branches else (sent.size if turn else 0))
            boundary = prompt.size
            answer = random_tokens(seed + 3, plan.answer)
            full = np.concatenate([prompt, random_tokens(seed + 2, plan.hidden), answer])
            one.cascade(full)
            sent, seed = (np.concatenate([prompt, answer]) if branches else full), seed + 3
            left = (time.perf_counter() - began) / (turn + 1) * (plan.turns - turn - 1)
            context.say(
                f"a client that {kept.client}, turn {turn + 1} of {plan.turns}"
                + (f", about {left:.0f} s left" if left >= 1 else "")
            )
            context.note(f"cascades, {kept.client}, {kept.checkpoint / 1e6:.0f} MB", {"kvstore": kept.durable, "plain": kept.plain})
        one.account(store)
    shutil.rmtree(directory)
    return kept
