"""Whatever is promoted, the engine goes on exactly as one that was never interrupted."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import Layout, Restored, SessionTier, Store
from kvstore.testing import HashEngine
from tests.support import SCALE

from .engines import LAYOUTS, uninterrupted


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    """Every layout in turn."""
    return LAYOUTS[request.param]


@pytest.mark.parametrize("seed", range(3))
def test_random_conversations(store: Store, layout: Layout, seed: int) -> None:
    """Turns of random conversations, on one engine that is dirty from the last one, equal an uninterrupted engine at every step."""
    chance = random.Random(seed)
    engine = HashEngine(layout)
    history: list[list[int]] = []
    reused = 0
    with SessionTier(store, engine, check=True) as tier:
        for _ in range(round(25 * SCALE)):
            tokens = [chance.randrange(3) for _ in range(chance.randint(1, 60))]
            if history and chance.random() < 0.8:
                base = chance.choice(history[-6:])
                tokens = (base[: chance.randint(1, len(base))] if chance.random() < 0.4 else base) + tokens
            tokens = tokens[:600]
            position = tier.promote(tokens)
            assert position == engine.position < len(tokens)
            if position:
                assert engine.state_hash() == uninterrupted(layout, tokens[:position]).state_hash()
                reused += 1
            engine.feed(tokens[position:])
            tier.cascade(tokens)
            answer = [chance.randrange(3) for _ in range(chance.randint(1, 20))]
            engine.feed(answer)
            tokens = tokens + answer
            tier.cascade(tokens)
            expected = uninterrupted(layout, tokens).state_hash()
            assert engine.state_hash() == expected, expected.differing(engine.state_hash())
            history.append(tokens)
            if chance.random() < 0.3:
                engine.scribble()
        tier.flush()
        stats = tier.stats
        assert stats.faults == stats.save_misses == stats.differing_blocks == stats.fallbacks == 0
        assert stats.saved == stats.cascades
    assert reused > 5


def test_hidden_reasoning_is_not_sent_back(store: Store, layout: Layout) -> None:
    """A client that leaves the model's reasoning out comes back to the turn's boundary, at every turn of a conversation."""
    tokens: list[int] = list(range(100, 140))
    boundary = 0
    for turn in range(6):
        engine = HashEngine(layout)
        with SessionTier(store, engine) as mine:
            position = mine.promote(tokens)
            assert position == boundary
            engine.feed(tokens[position:])
            mine.cascade(tokens)  # the turn's boundary, before the model reasons
            boundary = len(tokens)
            reasoning, answer = [900 + turn] * 30, [turn] * 10
            engine.feed([*reasoning, *answer])
            mine.cascade([*tokens, *reasoning, *answer])
        assert mine.stats.faults == 0
        assert engine.state_hash() == uninterrupted(layout, [*tokens, *reasoning, *answer]).state_hash()
        tokens = [*tokens, *answer, *range(turn, turn + 5)]


def test_something_is_left_to_compute(store: Store, layout: Layout) -> None:
    """A prompt that is stored whole is promoted up to its last token but one at most."""
    tokens = list(range(40))
    for length in (39, 40):
        with SessionTier(store, uninterrupted(layout, tokens[:length])) as first:
            first.cascade(tokens[:length])
    with SessionTier(store, HashEngine(layout)) as tier:
        assert tier.promote(tokens) == 39
        assert tier.promote([*tokens, 1]) == 40
        assert tier.promote([tokens[0]]) == 0


def test_a_dirty_engine_starts_clean_on_a_miss(store: Store, layout: Layout) -> None:
    """On a miss the engine has been reset: nothing of what it held before is in what it computes."""
    engine = uninterrupted(layout, [9] * 50)
    with SessionTier(store, engine) as tier:
        assert tier.promote([1, 2, 3]) == 0
        assert engine.position == 0
        engine.feed([1, 2, 3])
        assert engine.state_hash() == uninterrupted(layout, [1, 2, 3]).state_hash()
        assert (tier.stats.promotes, tier.stats.promoted, tier.stats.promote_misses) == (1, 0, 1)
        assert (tier.stats.reused_tokens, tier.stats.fresh_tokens) == (0, 3)


def test_a_dirty_engine_takes_a_prefix_whole(store: Store, layout: Layout) -> None:
    """A prefix applied over a longer, other session leaves nothing of that session."""
    tokens = list(range(50))
    with SessionTier(store, uninterrupted(layout, tokens)) as first:
        first.cascade(tokens)
    engine = uninterrupted(layout, [7] * 200)
    with SessionTier(store, engine) as tier:
        assert tier.promote([*tokens, 1, 2]) == 50
        engine.feed([1, 2])
        assert engine.state_hash() == uninterrupted(layout, [*tokens, 1, 2]).state_hash()


def test_the_engine_may_go_on_at_once(store: Store, layout: Layout) -> None:
    """What cascade took is not the engine's memory any more: overwriting all of it right after changes nothing that is stored."""
    tokens = list(range(300))
    engine = uninterrupted(layout, tokens)
    with SessionTier(store, engine) as tier:
        result = tier.cascade(tokens)
        engine.scribble()
        assert (result.tokens, result.stored_tokens, result.captured_tokens, result.missed) == (300, 0, 300, "")
        assert tier.flush()
        assert tier.promote([*tokens, 5]) == 300
        engine.feed([5])
        assert engine.state_hash() == uninterrupted(layout, [*tokens, 5]).state_hash()


def test_a_promote_right_after_a_cascade_waits_for_it(store: Store, layout: Layout) -> None:
    """A prompt whose prefix is still on its way into the store is not computed again."""
    tokens = list(range(200))
    engine = uninterrupted(layout, tokens)
    with SessionTier(store, engine) as tier:
        tier.cascade(tokens)
        assert tier.promote([*tokens, 1]) == 200


def test_a_salt_keeps_sessions_apart(store: Store, layout: Layout) -> None:
    """What was cascaded under one salt is not promoted under another."""
    tokens = list(range(50))
    with SessionTier(store, uninterrupted(layout, tokens), salt=b"a") as tier:
        tier.cascade(tokens)
    for salt, expected in ((b"", 0), (b"b", 0), (b"a", 50)):
        with SessionTier(store, HashEngine(layout), salt=salt) as tier:
            assert tier.promote([*tokens, 1]) == expected


def test_checking_finds_an_engine_that_varies(store: Store) -> None:
    """With check=True each cascade counts the stored blocks that the engine's rows differ from; without it none are compared."""
    layout, tokens = LAYOUTS["plain"], list(range(100))
    with SessionTier(store, uninterrupted(layout, tokens)) as tier:
        tier.cascade(tokens)
        tier.cascade(tokens)
        assert tier.stats.shared_blocks_checked == 0
    engine = uninterrupted(layout, tokens)
    engine.streams["v"][37] += 1
    with SessionTier(store, engine, check=True) as tier:
        tier.cascade(tokens)
        assert (tier.stats.shared_blocks_checked, tier.stats.differing_blocks) == (7, 1)


def test_counters_add_up(store: Store, layout: Layout) -> None:
    """Tokens reused and left to compute, tokens and bytes added, are what happened."""
    tokens = list(range(100))
    engine = HashEngine(layout)
    with SessionTier(store, engine) as tier:
        assert tier.promote(tokens) == 0
        engine.feed(tokens)
        tier.cascade(tokens)
        assert tier.promote([*tokens, *range(20)]) == 100
        engine.feed(list(range(20)))
        tier.cascade([*tokens, *range(20)])
        tier.flush()
        stats = tier.stats
    assert (stats.promotes, stats.promoted, stats.promote_misses) == (2, 1, 1)
    assert (stats.reused_tokens, stats.fresh_tokens) == (100, 120)
    assert (stats.cascades, stats.saved, stats.save_misses, stats.faults) == (2, 2, 0, 0)
    assert stats.new_tokens == 120
    assert stats.new_bytes > 0
    assert min(stats.restore_seconds, stats.capture_seconds, stats.save_seconds) > 0


class OneBuffer(HashEngine):
    """Has its states restored into a buffer of its own."""

    buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def apply(self, restored: Restored) -> None:
        """Take the states out of the buffer, which the next restore overwrites."""
        if self.buffer.size < restored.states_bytes:
            self.buffer = np.empty(restored.states_bytes, np.uint8)
        restored.copy_into(self.streams)
        states = restored.states(into=self.buffer)
        assert all(np.shares_memory(array, self.buffer) for array in states.values() if array.size)
        self.states = {name: array.copy() for name, array in states.items()}
        self.position = restored.length
        self._reread()


def test_states_into_a_buffer_of_the_engines(store: Store, layout: Layout) -> None:
    """An engine that has its states restored into one buffer, again and again, goes on as one that gets new memory."""
    engine = OneBuffer(layout)
    sessions = [[n, *range(40 + 7 * n)] for n in range(3)]
    with SessionTier(store, engine) as tier:
        for tokens in sessions:
            engine.reset()
            engine.feed(tokens)
            tier.cascade(tokens)
        for tokens in (*sessions, *reversed(sessions)):
            assert tier.promote([*tokens, 1]) == len(tokens)
            assert engine.state_hash() == uninterrupted(layout, tokens).state_hash()
        assert tier.stats.faults == 0
