"""Where states are saved without anybody asking: at the turn's boundary, at intervals, and where sessions part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Captured, CheckpointPolicy, SessionTier, Store
from kvstore import blocks as table
from kvstore.errors import KVStoreError
from kvstore.testing import HashEngine
from tests.store.index import all_nodes, checkpoints_on
from tests.support import SCALE, assert_sound

from .engines import HYBRID, LAYOUTS, PLAIN, uninterrupted

SYSTEM = [7 * i % 251 for i in range(203)]  # ends inside a block


def prefilled(
    store: Store, prompt: list[int], policy: CheckpointPolicy | None = None, answer: list[int] | None = None, salt: bytes = b""
) -> tuple[int, list[tuple[int, int]]]:
    """Run one request in a fresh engine; give what was reused and the spans that were computed. It equals one never interrupted."""
    engine = HashEngine(HYBRID)
    spans: list[tuple[int, int]] = []

    def compute(start: int, stop: int) -> None:
        assert engine.position == start
        spans.append((start, stop))
        engine.feed(prompt[start:stop])

    with SessionTier(store, engine, checkpoints=policy, salt=salt) as tier:
        reused = tier.prefill(prompt, compute)
        if answer is not None:
            engine.feed(answer)
            tier.cascade([*prompt, *answer])
    whole = [*prompt, *(answer or [])]
    assert engine.state_hash() == uninterrupted(HYBRID, whole).state_hash()
    assert spans[0][0] == reused
    assert spans[-1][1] == len(prompt)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert tier.stats.faults == tier.stats.save_misses == 0
    return reused, spans


def test_rows_alone_are_saved_at_the_end(store: Store) -> None:
    """A layout without states has nothing to stop for before the prompt's end."""
    with SessionTier(store, HashEngine(PLAIN), checkpoints=CheckpointPolicy(every=16)) as tier:
        assert tier.pauses(SYSTEM, 0) == (203,)
        assert tier.pauses(SYSTEM, 202) == (203,)
        assert tier.pauses(SYSTEM, 203) == ()


def test_the_same_prompt_is_resumed(store: Store) -> None:
    """The turn's checkpoint lies before the last token, so that a prompt that is sent again costs one token."""
    assert prefilled(store, SYSTEM) == (0, [(0, 202), (202, 203)])
    assert prefilled(store, SYSTEM) == (202, [(202, 203)])
    assert prefilled(store, [*SYSTEM, 1, 2, 3]) == (202, [(202, 205), (205, 206)])


def test_the_boundary_is_the_callers(store: Store) -> None:
    """A template whose last tokens aren't in the history later has its checkpoint before them."""
    policy = CheckpointPolicy(boundary=5)
    assert prefilled(store, [*SYSTEM, 901, 902, 903, 904, 905], policy) == (0, [(0, 203), (203, 208)])
    assert prefilled(store, [*SYSTEM, 1, 2, 3], policy)[0] == 203
    assert prefilled(store, [1, 2, 3], policy) == (0, [(0, 3)])  # shorter than its boundary: nothing is saved
    assert prefilled(store, SYSTEM, CheckpointPolicy(boundary=0), salt=b"0") == (0, [(0, 203)])
    assert prefilled(store, SYSTEM, CheckpointPolicy(boundary=0), salt=b"0") == (0, [(0, 203)])


def test_a_second_session_leaves_a_checkpoint_where_it_parts(store: Store) -> None:
    """The second session with a common beginning computes all of it and saves states there; the third starts from them."""
    assert prefilled(store, [*SYSTEM, *range(300, 360)], answer=[1, 2])[0] == 0
    assert prefilled(store, [*SYSTEM, *range(400, 470)], answer=[3])[1] == [(0, 203), (203, 272), (272, 273)]
    assert prefilled(store, [*SYSTEM, *range(500, 510)], answer=[4]) == (203, [(203, 212), (212, 213)])
    with SessionTier(store, HashEngine(HYBRID)) as tier:
        for first in (300, 400, 500):  # each has the states at the branch above its own two
            positions = checkpoints_on(tier.namespace, [*SYSTEM, *range(first, first + 100)])
            assert positions[0] == 203
            assert len(positions) <= 3


def test_states_at_a_branch_that_were_damaged_are_taken_anew(store: Store) -> None:
    """A checkpoint at the branch whose states are refused is none: the next session through it stops there again."""
    prefilled(store, [*SYSTEM, *range(300, 360)])
    prefilled(store, [*SYSTEM, *range(400, 470)])
    with SessionTier(store, HashEngine(HYBRID)) as tier:
        [at_branch] = [c for node in all_nodes(tier.namespace) for c in node.checkpoints if c.position == 203]
        scope = tier.namespace.scope.store
        for block in at_branch.ids:
            with scope.environment.reading() as txn:
                offset = table.offset_of(txn, block)
            scope.refuse(block, offset)
    third = [*SYSTEM, *range(500, 510)]
    assert prefilled(store, third) == (0, [(0, 203), (203, 212), (212, 213)])
    assert prefilled(store, [*SYSTEM, *range(600, 610)])[0] == 203


def test_a_common_beginning_too_short_to_pay(store: Store) -> None:
    """States at a branch that would save less than `least_gain` tokens are not taken, and none without `at_branches`."""
    first, second = [*SYSTEM[:100], *range(300, 360)], [*SYSTEM[:100], *range(400, 460)]
    for salt, policy, expected in (
        (b"a", CheckpointPolicy(least_gain=101), (159,)),
        (b"b", CheckpointPolicy(least_gain=100), (100, 159)),
        (b"c", CheckpointPolicy(least_gain=1, at_branches=False), (159,)),
    ):
        prefilled(store, first, policy, salt=salt)
        with SessionTier(store, HashEngine(HYBRID), checkpoints=policy, salt=salt) as tier:
            assert tier.pauses(second, 0) == expected
            assert tier.pauses(second, 100) == (159,)
            assert tier.pauses([*first, 1, 2], 0) == (161,)  # a longer session leaves nobody


def test_hidden_reasoning_leaves_no_states_behind_each_boundary(store: Store) -> None:
    """A chat that hides reasoning parts from its own past a few tokens behind each turn's boundary: no state is saved there."""
    prompt, length = list(SYSTEM), 1
    for turn in range(6):
        reused, spans = prefilled(store, prompt, answer=[900, 901, 800 + turn, *range(20)])
        assert reused == length - 1
        assert [stop for _, stop in spans] == [len(prompt) - 1, len(prompt)]
        length = len(prompt)
        prompt = [*prompt, 900, 901, *range(600 + turn, 640 + turn)]  # the history opens as the answer did, without its reasoning


def conversation(store: Store, turns: int, *, policy: CheckpointPolicy | None = None, tier_each_turn: bool = False) -> list[int]:
    """A chat whose client leaves each turn's reasoning out of the history; give the prompt that would come next."""
    prompt, boundary = list(SYSTEM), 1
    engine = HashEngine(HYBRID)
    tier = SessionTier(store, engine, checkpoints=policy)
    for turn in range(turns):
        if tier_each_turn:
            tier.close()
            engine = HashEngine(HYBRID)
            tier = SessionTier(store, engine, checkpoints=policy)
        assert tier.prefill(prompt, partial(_feed, engine, prompt)) == boundary - 1
        answer = [900, 901, 800 + turn, *range(20)]
        engine.feed(answer)
        tier.cascade([*prompt, *answer])
        tier.flush()
        assert engine.state_hash() == uninterrupted(HYBRID, [*prompt, *answer]).state_hash()
        boundary = len(prompt)
        prompt = [*prompt, 900, 901, *range(600 + turn, 640 + turn)]
    assert tier.stats.faults == tier.stats.save_misses == 0
    assert tier.stats.dropped_answers == (0 if tier_each_turn or (policy and not policy.drop_answers) else turns - 1)
    tier.close()
    return prompt


def test_an_answer_that_is_left_out_is_dropped(store: Store) -> None:
    """The reasoning that a client doesn't send back goes with the next turn: a long chat keeps two checkpoints and no dead rows."""
    prompt = conversation(store, 8)
    [info] = store.namespaces()
    assert (info.sessions, info.checkpoints) == (1, 2)
    assert info.tokens == len(prompt) - 42 + 23  # the last prompt that was read, and its answer
    with SessionTier(store, HashEngine(HYBRID)) as tier:
        assert checkpoints_on(tier.namespace, prompt) == [len(prompt) - 43, len(prompt) - 42 + 23]


@pytest.mark.parametrize("why", ["the policy says so", "another tier saved it"])
def test_an_answer_that_is_kept(store: Store, why: str) -> None:
    """Answers stay where the policy keeps them, and where the tier that sees the next turn doesn't know them."""
    kept = why == "the policy says so"
    conversation(store, 4, policy=CheckpointPolicy(drop_answers=not kept), tier_each_turn=not kept)
    [info] = store.namespaces()
    assert info.sessions == 4


def test_other_answers_to_one_prompt_stay(store: Store) -> None:
    """The same prompt again keeps the first answer beside the second; so do an edited prompt, and a history that has the answer."""
    first, second = [*SYSTEM, 1, 2, 3], [*SYSTEM, 1, 5, 6, 7]
    engine = HashEngine(HYBRID)
    with SessionTier(store, engine) as tier:

        def turn(prompt: list[int], answer: list[int], expected: int) -> None:
            assert tier.prefill(prompt, partial(_feed, engine, prompt)) == expected
            engine.feed(answer)
            tier.cascade([*prompt, *answer])
            tier.flush()

        turn(SYSTEM, first[203:], 0)
        turn(SYSTEM, second[203:], 202)
        for answered in (first, second):
            assert checkpoints_on(tier.namespace, answered)[-1] == len(answered)
        turn([*second, 8], [9], len(second))  # goes on from the second
        turn([*SYSTEM[:-5], 77, 78], [1], 0)  # edited before its end
        assert tier.stats.dropped_answers == 0
        for answered in (first, second):
            assert len(answered) in checkpoints_on(tier.namespace, answered)
        turn([*SYSTEM, 1, 99, 98], [7], 202)  # leaves both
        assert tier.stats.dropped_answers >= 1
        assert len(first) not in checkpoints_on(tier.namespace, first)


def test_an_answer_stays_when_the_next_turn_is_not_stored(store: Store) -> None:
    """What a turn supersedes goes only once the turn's own states are in the store."""
    engine = HashEngine(HYBRID)
    with SessionTier(store, engine) as tier:
        tier.prefill(SYSTEM, partial(_feed, engine, SYSTEM))
        engine.feed([1, 2, 3])
        tier.cascade([*SYSTEM, 1, 2, 3])
        tier.flush()
        prompt = [*SYSTEM, 1, *range(300, 340)]
        at = tier.promote(prompt)
        engine.feed(prompt[at:-1])
        with monkeypatched_states(engine):
            assert "no states" in tier.cascade(prompt[:-1]).missed
        tier.flush()
        assert tier.stats.dropped_answers == 0
        assert checkpoints_on(tier.namespace, [*SYSTEM, 1, 2, 3])[-1] == 206


@pytest.mark.parametrize("way", ["another session", "no further than where they part"])
def test_an_answer_stays_when_something_else_is_stored(store: Store, way: str) -> None:
    """A save that isn't the way past an answer doesn't drop it, nor with it what the next turn shares with it; that turn does."""
    answered, prompt, other = [*SYSTEM, 1, 2, 3], [*SYSTEM, 1, *range(300, 340)], [9] * 40
    engine = HashEngine(HYBRID)
    with SessionTier(store, engine) as tier:
        tier.prefill(SYSTEM, partial(_feed, engine, SYSTEM))
        engine.feed(answered[203:])
        tier.cascade(answered)
        tier.flush()
        before = checkpoints_on(tier.namespace, answered)
        assert tier.promote(prompt) == 202
        engine.reset()
        saved = other if way == "another session" else prompt[:202]
        engine.feed(saved)
        tier.cascade(saved)
        tier.flush()
        assert tier.stats.dropped_answers == 0
        assert checkpoints_on(tier.namespace, answered) == before == [202, 206]
        engine.reset()
        engine.feed(prompt)
        tier.cascade(prompt)
        tier.flush()
        assert tier.stats.dropped_answers == 1
        assert checkpoints_on(tier.namespace, prompt) == [202, len(prompt)]


def test_checkpoints_at_intervals(store: Store) -> None:
    """With `every`, states are taken at its multiples, and one is kept in each such span of a path, beside the two deepest."""
    policy = CheckpointPolicy(every=64)
    prompt = [*SYSTEM, *range(300, 400)]
    assert [stop for _, stop in prefilled(store, prompt, policy)[1]] == [64, 128, 192, 256, 302, 303]
    with SessionTier(store, HashEngine(HYBRID), checkpoints=policy) as tier:
        assert checkpoints_on(tier.namespace, prompt) == [64, 128, 192, 256, 302]
        assert tier.pauses(prompt, 130) == (192, 256, 302)
    edited = [*prompt[:150], *range(700, 800)]
    reused, spans = prefilled(store, edited, policy)
    assert (reused, [stop for _, stop in spans]) == (128, [192, 249, 250])
    longer = [*edited, *range(60)]
    prefilled(store, longer, policy)
    with SessionTier(store, HashEngine(HYBRID)) as tier:  # which has the policy of the latest handle
        assert checkpoints_on(tier.namespace, longer) == [64, 128, 249, 256, 309]


def test_many_checkpoints_on_one_edge(store: Store) -> None:
    """More checkpoints than an index record has room for inside its page are kept, found and restored all the same."""
    policy = CheckpointPolicy(every=2)
    prompt = [*SYSTEM, *range(300, 600)]
    prefilled(store, prompt, policy)
    with SessionTier(store, HashEngine(HYBRID), checkpoints=policy) as tier:
        assert checkpoints_on(tier.namespace, prompt) == [*range(2, 502, 2), 502]
    for length in (3, 100, 101, 499):
        assert prefilled(store, [*prompt[:length], 999], policy)[0] == length - length % 2


@pytest.mark.parametrize("per_path", [1, 2, 5])
def test_how_many_a_path_keeps(store: Store, per_path: int) -> None:
    """A conversation keeps its `per_path` deepest checkpoints and no other, and the states on disk are theirs."""
    policy = CheckpointPolicy(per_path=per_path)
    prompt: list[int] = []
    ends: list[int] = []
    for turn in range(8):
        prompt = [*prompt, *range(100 * turn, 100 * turn + 40)]
        prefilled(store, prompt, policy, answer=list(range(10)))
        prompt += range(10)
        ends += [len(prompt) - 11, len(prompt)]
    with SessionTier(store, HashEngine(HYBRID), checkpoints=policy) as tier:
        assert checkpoints_on(tier.namespace, prompt) == ends[-per_path:]
        [info] = store.namespaces()
        packed = [c.packed_bytes for node in all_nodes(tier.namespace) for c in node.checkpoints]
    assert info.checkpoints == per_path
    assert info.states_bytes == sum(packed) > 0
    assert info.rows_bytes + info.states_bytes == store.stats().payload_bytes


def test_an_eviction_keeps_to_the_policy(store: Store) -> None:
    """Where an eviction takes the last branch away, what only the branch kept goes, and what the policy keeps stays."""
    policy = CheckpointPolicy(every=64)
    trunk, branch = [*SYSTEM, *range(300, 400)], [*SYSTEM[:150], *range(500, 560)]
    prefilled(store, trunk, policy)
    prefilled(store, branch, policy)
    with SessionTier(store, HashEngine(HYBRID), checkpoints=policy) as tier:
        before = checkpoints_on(tier.namespace, trunk)
        tier.namespace.evict(branch)
        assert checkpoints_on(tier.namespace, trunk) == before == [64, 128, 192, 256, 302]


def test_a_fault_leaves_out_the_branch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index can't be read, the pauses that need no look at it are left, and the fault is counted."""
    prefilled(store, [*SYSTEM, *range(300, 360)])
    with SessionTier(store, HashEngine(HYBRID)) as tier:
        assert tier.pauses([*SYSTEM, 1], 0) == (203,)
        assert tier.pauses([*SYSTEM, *range(400, 460)], 0) == (203, 262)
        with monkeypatch.context() as patch:
            patch.setattr("kvstore.tier.placement.walk", _failing)
            assert tier.pauses([*SYSTEM, *range(400, 460)], 0) == (262,)
        assert tier.stats.faults == 1


@contextmanager
def monkeypatched_states(engine: HashEngine) -> Iterator[None]:
    """Let an engine hand out rows alone."""
    whole = engine.capture
    engine.capture = lambda start, stop: Captured(whole(start, stop).streams)  # type: ignore[method-assign]  # for a while
    yield
    engine.capture = whole  # type: ignore[method-assign]


def _failing(*_: object, **__: object) -> None:
    raise KVStoreError("the index can't be read")


@pytest.mark.parametrize(
    "wrong", [{"per_path": 0}, {"every": -1}, {"least_gain": 0}, {"boundary": -1}, {"per_path": True}, {"every": 1.5}]
)
def test_a_policy_of_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    """A number that is none or out of range is refused by its name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CheckpointPolicy(**wrong)


def test_something_else_than_a_policy_is_refused(store: Store) -> None:
    """What is no policy is refused when it is given, and not in the middle of a save."""
    for wrong in (3, {"every": 64}, CheckpointPolicy):
        with pytest.raises(TypeError, match="CheckpointPolicy"):
            store.namespace(HYBRID, checkpoints=wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30, unique=True).map(sorted), st.integers(1, 6), st.integers(0, 200))
def test_what_a_path_keeps_is_bounded(positions: list[int], per_path: int, every: int) -> None:
    """The deepest are always kept, at most one more in each span of `every`, and keeping again takes nothing away."""
    policy = CheckpointPolicy(per_path=per_path, every=every)
    kept = policy.kept(positions)
    assert set(positions[-per_path:]) <= kept <= set(positions)
    assert len(kept) <= per_path + (positions[-1] // every + 1 if every else 0)
    assert policy.kept(sorted(kept)) == kept
    if every:
        assert {p // every for p in kept} == {p // every for p in positions}


def _feed(engine: HashEngine, prompt: list[int], start: int, stop: int) -> None:
    engine.feed(prompt[start:stop])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_random_conversations(store: Store, name: str, seed: int) -> None:
    """Random turns, edits and branches under random policies, one engine after another: all equal an uninterrupted engine."""
    chance, layout = random.Random(seed), LAYOUTS[name]
    policy = CheckpointPolicy(
        per_path=chance.randint(1, 3), every=chance.choice([0, 17, 64]), least_gain=chance.choice([1, 20, 128]), boundary=seed
    )
    history: list[list[int]] = [[]]
    reused = 0
    for _ in range(round(20 * SCALE)):
        base = chance.choice(history[-6:])
        prompt = base[: chance.randint(0, len(base))] if chance.random() < 0.5 else base
        prompt = [*prompt, *(chance.randrange(3) for _ in range(chance.randint(1, 90)))][:700]
        engine = HashEngine(layout)
        with SessionTier(store, engine, checkpoints=policy) as tier:
            found = tier.prefill(prompt, partial(_feed, engine, prompt))
            assert found < len(prompt)
            reused += found > 0
            answer = [chance.randrange(3) for _ in range(chance.randint(1, 20))]
            engine.feed(answer)
            tier.cascade([*prompt, *answer])
        history.append([*prompt, *answer])
        assert engine.state_hash() == uninterrupted(layout, history[-1]).state_hash()
        assert tier.stats.faults == tier.stats.save_misses == 0
        for node in all_nodes(tier.namespace):
            assert all(c.complete for c in node.checkpoints)
        if not policy.every:
            kept, branches = checkpoints_on(tier.namespace, history[-1]), len(all_nodes(tier.namespace))
            assert len(kept) <= policy.per_path * (branches + 1)
    assert_sound(store)
    assert reused > 3
