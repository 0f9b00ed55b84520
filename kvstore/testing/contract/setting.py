"""What a check works with: engines, made-up tokens, a store, and comparing two engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

import numpy as np

from kvstore.ids import TokenArray
from kvstore.layout import Layout, StateHash, state_hash
from kvstore.store import Store
from kvstore.testing.contract.driver import E, EngineDriver
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.wrapping import Wrap, Wrapped
from kvstore.testing.differences import differences
from kvstore.testing.sessions import Array
from kvstore.tier import SessionTier

__all__ = ["Look", "Setting", "default_length", "positions_needed"]


def default_length(layout: Layout) -> int:
    """The length of the suite's sessions if none is given: two blocks and a half, with a row in the middle of its span."""
    return 2 * layout.block_tokens + layout.block_tokens // 2 + 1


def positions_needed(layout: Layout, length: int = 0) -> int:
    """How many positions an engine of the contract suite needs room for."""
    return (length or default_length(layout)) + _ahead(layout) + layout.block_tokens


def _ahead(layout: Layout) -> int:
    return max(8, *(stream.tokens_per_row for stream in layout.streams), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """A copy of all that an engine held at a position, and what it would have said next if that was asked for."""

    position: int
    parts: dict[str, Array]
    hash: StateHash
    observed: bytes | None


class Setting(Generic[E]):
    """One check's surroundings. `case` names a namespace of its own in the store: nothing is shared between two.

    Attributes
    ----------
    streams : dict of str to Stream
        The layout's, by name.
    length : int
        Tokens of the longest session that is saved.
    ahead : int
        Tokens that are read after it.
    tokens, other : uint32 array
        Of two sessions, `length + ahead` of the first and a block more of the other.
    boundaries : tuple of int
        Lengths around the first two blocks' ends, and `length`.
    """

    def __init__(self, driver: EngineDriver[E], layout: Layout, store: Store, check: str, *, length: int, seed: int) -> None:
        size = layout.block_tokens
        self.driver, self.layout, self.store, self.length, self.seed = driver, layout, store, length, seed
        self.streams = {stream.name: stream for stream in layout.streams}
        self.ahead = _ahead(layout)
        self.tokens = driver.tokens(length + self.ahead, 2 * seed)
        self.other = driver.tokens(length + self.ahead + size, 2 * seed + 1)
        around = (size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, length)
        self.boundaries = tuple(sorted({position for position in around if position}))
        self._check = check
        self._salts: set[bytes] = set()

    def forget(self) -> None:
        """Take what the check has stored out of the store."""
        for salt in self._salts:
            self.store.namespace(self.layout, salt=salt).evict()
        self._salts.clear()

    @contextmanager
    def engine(self, *batches: TokenArray) -> Iterator[E]:
        """Make an engine that has read some batches."""
        engine = self.driver.make()
        try:
            for batch in batches:
                self.driver.feed(engine, batch)
            yield engine
        finally:
            self.driver.close(engine)

    def tier(self, engine: E | Wrapped, case: object = "") -> SessionTier:
        """Put an engine over the store."""
        salt = f"contract {self._check} {self.seed} {case}".encode()
        self._salts.add(salt)
        return SessionTier(self.store, engine, salt=salt)

    def save(self, engine: E, tokens: TokenArray, case: object = "") -> None:
        """Cascade a session that the engine has read, and wait until it is stored."""
        with self.tier(engine, case) as tier:
            missed = tier.cascade(tokens).missed
            tier.flush()
            if missed or tier.stats.save_misses or tier.stats.faults:
                raise Broken(f"a cascade of {tokens.size} tokens was not stored: {missed or tier.stats}")

    def promote(self, engine: E, prompt: TokenArray, expected: int, case: object = "", *, wrap: Wrap | None = None) -> None:
        """Promote a prompt, which has to leave the engine at `expected`."""
        wrapped = Wrapped(engine, wrap)
        with self.tier(wrapped, case) as tier:
            reused = tier.promote(prompt)
        if reused != expected:
            why = f"; `apply` raised {wrapped.raised!r}" if wrapped.raised is not None else ""
            raise Broken(f"a promote of {prompt.size} tokens reused {reused}, expected {expected}{why}")

    def look(self, engine: E, position: int, *, observe: bool = True) -> Look:
        """Copy everything that an engine holds."""
        observed = self.driver.observe(engine) if observe else None
        parts = {name: self._copy(name, array, position) for name, array in self.driver.parts(engine, position).items()}
        return Look(position, parts, state_hash(self.layout, parts, position), observed)

    def _copy(self, name: str, array: Array, position: int) -> Array:
        stream = self.streams.get(name)
        if stream is None:
            return np.array(array)
        stream.check_array(array, position, exact=False)
        return np.array(array[(slice(None),) * stream.token_axis + (slice(stream.rows(position)),)])

    def batches_after(self, position: int) -> tuple[TokenArray, TokenArray]:
        """What follows on a prefix of the first session: one token, then the rest in one batch."""
        return self.tokens[position : position + 1], self.tokens[position + 1 : position + self.ahead]

    def go_on(self, engine: E, position: int) -> Iterator[Look]:
        """Let an engine that stands at `position` of the first session read on; a look after each batch."""
        for batch in self.batches_after(position):
            self.driver.feed(engine, batch)
            position += batch.size
            yield self.look(engine, position)

    def compare(self, expected: Look, seen: Look, what: str) -> None:
        """Refuse an engine that differs from another one; the message names the parts and their first rows that differ."""
        if differing := expected.hash.differing(seen.hash):
            details = "; ".join(map(str, differences(self.layout, expected.parts, seen.parts, expected.position)))
            raise Broken(f"{what}: at position {expected.position} {', '.join(differing)} differ: {details}")
        if None not in (expected.observed, seen.observed) and expected.observed != seen.observed:
            raise Broken(
                f"{what}: at position {expected.position} every stream and state is equal, and yet the engine says something "
                "else next: it holds something that its layout doesn't name, or `observe` isn't deterministic"
            )
