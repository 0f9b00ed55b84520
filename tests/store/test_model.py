"""The store against a plain dictionary: random saves, restores, evictions and reopenings, with and without states."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import Layout, Lease, Namespace, Store
from kvstore.testing import destination, session_rows, session_states, states_equal
from tests.figures import Figures
from tests.support import CAP, SEED, examples, hybrid_layout, plain_layout

from .index import nodes_on

Key = tuple[int, ...]
TOKENS = (0, 1, 2)
TOKEN = st.sampled_from(TOKENS)


RUNS: Counter[str] = Counter()


class Model(RuleBasedStateMachine):
    """A namespace and what it has to hold.

    `stored` is the set of prefixes whose rows have to be stored, no more and no less. `rows` has, for each stream and each prefix
    that ends a row, the bytes that were saved first for it (anew after an eviction); `checkpoints` the states that were saved.
    """

    layout: Layout

    def __init__(self) -> None:
        super().__init__()
        RUNS[type(self).__name__] += 1
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.path = self.directory / "s"
        self.rows: dict[tuple[str, Key], bytes] = {}
        self.checkpoints: dict[Key, list[dict[str, Any]]] = {}
        self.sessions: list[Key] = []
        self.stored: set[Key] = set()  # prefixes whose rows have to be stored
        self.writer = 0
        self.lease: Lease | None = None
        self.store = Store.open(self.path, max_bytes=CAP)
        self.namespace: Namespace = self.store.namespace(self.layout)

    @initialize(tokens=st.lists(TOKEN, min_size=1, max_size=60))
    def begin(self, tokens: list[int]) -> None:
        """Save a first session."""
        self._save(tuple(tokens), None, False, 0)

    @rule(
        at=st.integers(0, 1 << 20),
        cut=st.floats(0, 1),
        more=st.lists(TOKEN, max_size=45),
        start=st.integers(0, 8),
        states=st.booleans(),
        check=st.booleans(),
    )
    def save_branch(self, at: int, cut: float, more: list[int], start: int, states: bool, check: bool) -> None:
        """Save a session that goes on from somewhere in a session saved before."""
        base = self.sessions[at % len(self.sessions)]
        tokens = base[: round(cut * len(base))] + tuple(more)
        if tokens:
            self._save(tokens, start, check, int(states))

    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=100), states=st.booleans())
    def save_new(self, tokens: list[int], states: bool) -> None:
        """Save a session that has nothing to do with the others, but by chance."""
        self._save(tuple(tokens), None, False, int(states))

    def _save(self, tokens: Key, start: int | None, check: bool, states: int) -> None:
        layout, size = self.layout, self.layout.block_tokens
        self.writer += 1
        before = self._held(tokens)
        origin = min((start or 0) * size, before // size * size)
        rows = session_rows(layout, list(tokens), writer=self.writer)
        given = {
            s.name: rows[s.name][(slice(None),) * s.token_axis + (slice(origin // s.tokens_per_row, None),)] for s in layout.streams
        }
        checkpoint = session_states(layout, list(tokens), writer=self.writer) if layout.states and states else None
        result = self.namespace.save(list(tokens), given, states=checkpoint, start=origin, check=check)
        assert result.tokens == len(tokens)
        assert result.stored_tokens == before
        for stream in layout.streams:
            by_row = np.moveaxis(rows[stream.name], stream.token_axis, 0)
            for index in range(stream.rows(len(tokens))):
                prefix = tokens[: (index + 1) * stream.tokens_per_row]
                if len(prefix) > result.stored_tokens:
                    self.rows[stream.name, prefix] = by_row[index].tobytes()
                else:
                    assert (stream.name, prefix) in self.rows, "it was stored before"
        self.stored.update(tokens[:n] for n in range(1, len(tokens) + 1))
        if checkpoint is not None:
            self.checkpoints.setdefault(tokens, []).append(checkpoint)
        self.sessions.append(tokens)
        if not layout.states or checkpoint is not None:
            self._restore(tokens, exactly=len(tokens))

    def _held(self, tokens: Key) -> int:
        """How many leading tokens the store has to have rows for."""
        return next((n for n in range(len(tokens), 0, -1) if tokens[:n] in self.stored), 0)

    @rule(at=st.integers(0, 1 << 20), cut=st.floats(0, 1), more=st.lists(TOKEN, max_size=5), limit=st.integers(0, 120) | st.none())
    def restore(self, at: int, cut: float, more: list[int], limit: int | None) -> None:
        """Restore a prompt that begins like a saved session."""
        base = self.sessions[at % len(self.sessions)]
        tokens = base[: round(cut * len(base))] + tuple(more)
        if tokens:
            self._restore(tokens, limit=limit)

    def _restore(self, tokens: Key, *, exactly: int | None = None, limit: int | None = None) -> None:
        layout = self.layout
        most = len(tokens) if limit is None else min(limit, len(tokens))
        found = self.namespace.match(list(tokens), limit=limit)
        with self.namespace.lease(list(tokens), limit=limit) as lease:
            assert lease.length == (0 if found is None else found.length) <= most
            assert exactly is None or lease.length == exactly
            if not layout.states:
                assert lease.length == min(self._held(tokens), most)
            assert lease.tokens.tolist() == list(tokens[: lease.length])
            if not lease:
                return
            into = destination(layout, lease.length, spare=2)
            lease.copy_into(into)
            lease.validate()
            for stream in layout.streams:
                viewed = np.concatenate(lease.views(stream.name), axis=stream.token_axis)
                by_row = np.moveaxis(into[stream.name], stream.token_axis, 0)
                by_view = np.moveaxis(viewed, stream.token_axis, 0)
                assert len(by_view) == stream.rows(lease.length)
                for index in range(stream.rows(lease.length)):
                    raw = by_row[index].tobytes()
                    assert raw == self.rows[stream.name, tokens[: (index + 1) * stream.tokens_per_row]]
                    assert by_view[index].tobytes() == raw
                assert set(by_row[stream.rows(lease.length) :].tobytes()) <= {0xA5}
            if layout.states:
                states = lease.states()
                assert any(states_equal(states, saved) for saved in self.checkpoints[tokens[: lease.length]])

    @rule(at=st.integers(0, 1 << 20))
    def evict(self, at: int) -> None:
        """Evict a session: what others share with it stays."""
        tokens = self.sessions[at % len(self.sessions)]
        end = self._held(tokens)
        alone = end == len(tokens) and not any((*tokens[:end], token) in self.stored for token in TOKENS)
        # up to where another session branches off
        shared = max((n for n in range(end) if self._branches(tokens, n)), default=0)
        result = self.namespace.evict(list(tokens))
        assert result.tokens == (end - shared if alone else 0)
        if alone:
            self.stored -= {tokens[:n] for n in range(shared + 1, end + 1)}
        found = self.namespace.match(list(tokens))
        assert found is None or found.stored_tokens == self._held(tokens)

    def _branches(self, tokens: Key, at: int) -> bool:
        return any((*tokens[:at], token) in self.stored for token in TOKENS if token != tokens[at])

    @rule(pages=st.integers(1, 40))
    def evict_what_is_worth_least(self, pages: int) -> None:
        """Evict as a save does that needs room: a beginning of each session is left, or nothing, with the bytes it had."""
        self.store.evict(free_bytes=pages << 15)
        left = {
            session: max((node.end for node in nodes_on(self.namespace, list(session))), default=0) for session in self.sessions
        }
        left = {session: min(end, self._held(session)) for session, end in left.items()}
        self.stored = {session[:n] for session, end in left.items() for n in range(1, end + 1)}
        for session in self.sessions:
            found = self.namespace.match(list(session))
            assert found is None or found.stored_tokens == self._held(session) == left[session]
            if not self.layout.states:
                assert (0 if found is None else found.length) == left[session]

    @precondition(lambda self: self.lease is None)
    @rule(at=st.integers(0, 1 << 20))
    def hold(self, at: int) -> None:
        """Take a lease and keep it while other things happen."""
        tokens = self.sessions[at % len(self.sessions)]
        self.lease = self.namespace.lease(list(tokens))
        self.held = [[v.tobytes() for v in self.lease.views(s.name)] for s in self.layout.streams]

    @precondition(lambda self: self.lease is not None)
    @rule()
    def let_go(self) -> None:
        """The kept lease still has the bytes that it had, whatever was saved and evicted since."""
        assert self.lease is not None
        self.lease.validate()
        assert self.held == [[v.tobytes() for v in self.lease.views(s.name)] for s in self.layout.streams]
        self.lease.close()
        self.lease = None

    @precondition(lambda self: self.lease is None)
    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.store.close()
        self.store = Store.open(self.path)
        self.namespace = self.store.namespace(self.layout)

    @invariant()
    def is_sound(self) -> None:
        """All records agree."""
        found = self.store.verify()
        assert found.ok, found.problems

    def teardown(self) -> None:
        """Every byte hashes to its id, and after evicting everything nothing is left."""
        try:
            if self.lease is not None:
                self.lease.close()
            found = self.store.verify(deep=True)
            assert found.ok, found.problems
            self.namespace.evict()
            stats = self.store.stats()
            assert (stats.blocks, stats.nodes, stats.payload_bytes) == (0, 0, 0)
            assert self.store.verify(deep=True).ok
        finally:
            self.store.close()
            shutil.rmtree(self.directory)


class PlainModel(Model):
    """Without states: every token can be restored."""

    layout = plain_layout()


class HybridModel(Model):
    """With states: checkpoints only."""

    layout = hybrid_layout()


TestPlain = PlainModel.TestCase
TestPlain.settings = settings(max_examples=examples(25), stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestHybrid = HybridModel.TestCase
TestHybrid.settings = TestPlain.settings


def test_how_many_runs(figures: Figures) -> None:
    """Both models were run as often as they were to be, if they were."""
    if not RUNS:
        pytest.skip("the models were not run")
    assert RUNS.total() >= len(RUNS) * TestPlain.settings.max_examples
    runs = ", ".join(f"{count} runs of {name}" for name, count in sorted(RUNS.items()))
    figures.add(
        f"state machine (seed {SEED})", runs, "up to 30 steps each with evictions and reopenings, all as the dictionary has it"
    )
