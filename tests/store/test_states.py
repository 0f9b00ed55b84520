"""States: checkpoints at exact positions, which of them are kept, and what a match makes of them."""

from __future__ import annotations

import random
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import CheckpointPolicy, Layout, Namespace, State, Store, Stream
from kvstore import blocks as table
from kvstore.errors import ArrayError
from kvstore.records.block import Ref
from kvstore.testing import session_rows, session_states, states_equal
from tests.support import CAP, SCALE, assert_restores, assert_sound, hybrid_layout, save

from .index import all_nodes, checkpoints_on, nodes_on

TOKENS = list(range(100))


def test_a_match_answers_the_deepest_checkpoint(store: Store) -> None:
    """Rows alone can't be restored; a prompt matches at the deepest checkpoint at or before where it parts, exactly there."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:90], states=False)
    assert namespace.match(TOKENS) is None
    save(namespace, TOKENS[:50])
    save(namespace, TOKENS[:70])
    for prompt, expected in ((TOKENS, 70), (TOKENS[:70], 70), (TOKENS[:69], 50), ([*TOKENS[:60], 999], 50), (TOKENS[:49], 0)):
        assert_restores(namespace, prompt, expected)
    found = namespace.match(TOKENS)
    assert found is not None
    assert (found.length, found.stored_tokens) == (70, 90)
    limited = namespace.match(TOKENS, limit=69)
    assert limited is not None
    assert limited.length == 50


@pytest.mark.parametrize("position", [1, 15, 16, 17, 32, 47])
def test_a_checkpoint_at_any_position(store: Store, position: int) -> None:
    """States come back at exactly the position where they were saved, on and off block boundaries."""
    namespace = store.namespace(hybrid_layout())
    result = save(namespace, TOKENS[:position])
    assert result.checkpoint
    assert_restores(namespace, TOKENS, position)


def test_states_for_rows_that_are_stored(store: Store) -> None:
    """States may follow rows that were saved without them, at the end or in the middle of a longer session, with no rows given."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS, states=False)
    for position in (96, 32):
        result = save(namespace, TOKENS[:position], start=position)
        assert (result.new_tokens, result.checkpoint) == (0, True)
    assert checkpoints_on(namespace, TOKENS) == [32, 96]
    again = save(namespace, TOKENS[:96], start=96)
    assert (again.new_blocks, again.written_bytes, again.checkpoint) == (0, 0, True)


def test_the_first_writers_states_stay(store: Store) -> None:
    """States saved again at a position are a success that writes nothing; the first ones come back."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS, writer=1)
    assert save(namespace, TOKENS, writer=2).written_bytes == 0
    assert_restores(namespace, TOKENS, 100, writer=1)


def test_each_path_keeps_its_two_deepest(store: Store) -> None:
    """As a conversation goes on, the two deepest checkpoints stay and those before go, blocks and all."""
    namespace = store.namespace(hybrid_layout())
    for position in range(10, 101, 10):
        save(namespace, TOKENS[:position])
        assert checkpoints_on(namespace, TOKENS) == [p for p in (position - 10, position) if p]
        assert_sound(store)
    [node] = nodes_on(namespace, TOKENS)
    assert store.stats().blocks == 7 + sum(len(c.ids) for c in node.checkpoints) == 9
    assert_restores(namespace, TOKENS[:99], 90)


def test_a_branch_keeps_a_checkpoint_at_or_before_it(store: Store) -> None:
    """Where sessions part, the deepest checkpoint at or before the branch stays, however deep the branches go."""
    namespace = store.namespace(hybrid_layout())
    shared = TOKENS[:40]
    save(namespace, shared)
    branches = [[*shared, *[1000 + n] * 60] for n in range(3)]
    for end in (50, 60, 70, 80, 100):
        for branch in branches:
            save(namespace, branch[:end])
    for branch in branches:
        assert checkpoints_on(namespace, branch) == [40, 80, 100]
        assert_restores(namespace, branch, 100)
    assert_restores(namespace, [*shared, 7], 40)
    for branch in branches[:2]:
        namespace.evict(branch)
    assert_restores(namespace, branches[2], 100)
    assert_sound(store)


def test_a_damaged_checkpoint_takes_no_others_place(store: Store) -> None:
    """A checkpoint whose states are damaged counts for nothing: the two deepest that can be restored stay beside it."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:20])
    save(namespace, TOKENS[:40])
    [node] = nodes_on(namespace, TOKENS)
    for block in node.checkpoints[-1].ids:
        with namespace.scope.store.environment.reading() as txn:
            offset = table.offset_of(txn, block)
        namespace.scope.store.refuse(block, offset)
    save(namespace, TOKENS[:60])
    assert checkpoints_on(namespace, TOKENS) == [20, 40, 60]
    assert_restores(namespace, TOKENS[:59], 20)
    save(namespace, TOKENS[:80])
    assert checkpoints_on(namespace, TOKENS) == [60, 80]
    assert_sound(store)


def test_policies_are_looked_up_where_they_are_needed(store: Store) -> None:
    """A transaction looks up the policies of the roots that it evicts from, and copies none: there may be one for each salt."""
    namespaces = [store.namespace(hybrid_layout(), salt=bytes([n])) for n in range(3)]
    for namespace in namespaces:
        save(namespace, TOKENS[:20])
    plain = store.namespace(Layout((Stream("k", "u8", (4,)),), block_tokens=16))
    save(plain, TOKENS[:20])
    scope = namespaces[0].scope.store
    with scope.environment.reading() as txn:
        stateful = scope.stateful(txn)
        roots = [namespace.scope.root(txn) for namespace in namespaces]
        assert sorted(stateful) == sorted(roots)
        assert len(stateful) == 3
        assert plain.scope.root(txn) not in stateful
    assert stateful.get(roots[1]) == CheckpointPolicy()
    given = CheckpointPolicy(per_path=7)
    store.namespace(hybrid_layout(), salt=b"\x01", checkpoints=given)
    assert [stateful[root] for root in roots] == [CheckpointPolicy(), given, CheckpointPolicy()]


def test_another_session_takes_none_of_what_a_branch_keeps(store: Store) -> None:
    """However many a policy keeps: what one branch saves leaves the others as many, those before the branch among them."""
    namespace = store.namespace(hybrid_layout(), checkpoints=CheckpointPolicy(per_path=4))
    for end in (10, 20, 30, 40, 50):
        save(namespace, TOKENS[:end])
    other = [*TOKENS[:40], *[5] * 40]
    for end in (50, 60, 70, 80):
        save(namespace, other[:end])
        assert checkpoints_on(namespace, TOKENS) == [20, 30, 40, 50]
    assert checkpoints_on(namespace, other) == [20, 30, 40, 50, 60, 70, 80]
    for end in (60, 70, 80):
        save(namespace, TOKENS[:end])
    assert checkpoints_on(namespace, TOKENS) == [40, 50, 60, 70, 80]
    assert checkpoints_on(namespace, other) == [40, 50, 60, 70, 80]
    assert_sound(store)


def test_a_checkpoint_before_the_branch_stays(store: Store) -> None:
    """If there is none at the branch itself, the deepest before it is kept for the others that branch off there."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:30])
    save(namespace, TOKENS[:60])
    save(namespace, TOKENS[:80])
    assert checkpoints_on(namespace, TOKENS) == [60, 80]
    other = [*TOKENS[:70], *[5] * 10]
    save(namespace, other)
    assert checkpoints_on(namespace, other) == [60, 80]
    for end in (90, 95, 100):
        save(namespace, TOKENS[:end])
    assert checkpoints_on(namespace, TOKENS) == [60, 95, 100]
    assert_restores(namespace, other[:75], 60)


def test_a_split_hands_checkpoints_up(store: Store) -> None:
    """When an edge is split, checkpoints at or before the split belong to the upper part, later ones to the lower."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:40])
    save(namespace, TOKENS[:80])
    save(namespace, [*TOKENS[:40], 7], states=False)
    upper, lower = nodes_on(namespace, TOKENS[:80])
    assert [c.position for c in upper.checkpoints] == [40]
    assert [c.position for c in lower.checkpoints] == [80]
    assert_restores(namespace, TOKENS, 80)
    assert_restores(namespace, [*TOKENS[:40], 7], 40)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("seed", range(6))
def test_every_session_has_what_the_policy_says(store: Store, seed: int) -> None:
    """However sessions grow, part and are saved again in their middle: each keeps its deepest and one in each span of `every`."""
    chance = random.Random(seed)
    policy = CheckpointPolicy(per_path=1 + seed % 4, every=chance.choice([0, 13, 32]))
    namespace = store.namespace(hybrid_layout(), checkpoints=policy)
    had: dict[tuple[int, ...], set[int]] = {}  # by session, the positions it had when it came to be, and those saved since
    for _ in range(round(40 * SCALE)):
        base = chance.choice(list(had)) if had and chance.random() < 0.8 else ()
        kept = base[: chance.choice([len(base), chance.randint(0, len(base))])]
        tokens = (*kept, *(chance.randrange(3) for _ in range(chance.choice([0, 1, 10, 20]))))[:120]
        if not tokens:
            continue
        shared = max((_common(one, tokens) for one in had), default=0)
        before = {p for p in checkpoints_on(namespace, list(tokens)) if p <= shared}
        save(namespace, list(tokens))
        grown = [one for one in had if tokens[: len(one)] == one]
        through = [one for one in had if one[: len(tokens)] == tokens]
        if not through:
            through = [tokens]
            had[tokens] = had.pop(grown[0]) if grown else before
        for one in through:
            had[one].add(len(tokens))
        for one, positions in had.items():
            there = set(checkpoints_on(namespace, list(one)))
            assert policy.kept(sorted(positions)) <= there, (one, positions, there)
    assert len(had) > 3
    for one in had:
        assert_restores(namespace, list(one), checkpoints_on(namespace, list(one))[-1])
    assert_sound(store)


def test_an_eviction_that_leaves_one_child_drops_what_the_branch_kept(store: Store) -> None:
    """When a branching point is one no more because of an eviction for space, its extra checkpoint goes with the policy."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:40])
    for end in (60, 80, 100):
        save(namespace, TOKENS[:end])
    other = [*TOKENS[:40], *[5] * 10]
    save(namespace, other)
    assert len(checkpoints_on(namespace, TOKENS)) <= 3
    namespace.evict(other)
    save(namespace, [*TOKENS, 1])
    assert checkpoints_on(namespace, [*TOKENS, 1])[-2:] == [100, 101]
    assert len(checkpoints_on(namespace, [*TOKENS, 1])) == 2


def test_an_eviction_counts_what_the_policy_drops_with_it(store: Store) -> None:
    """Pages of the checkpoints that only a branch kept are among what an eviction says it has freed: no more goes than must."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS[:40])
    other = [*TOKENS[:40], *[5] * 10]
    save(namespace, other)
    for end in (60, 80, 100):
        save(namespace, TOKENS[:end])
    assert checkpoints_on(namespace, TOKENS) == [40, 80, 100]
    before = _block_bytes(namespace)
    result = namespace.evict(other)
    assert checkpoints_on(namespace, TOKENS) == [80, 100]
    assert result.freed_bytes == before - _block_bytes(namespace) > 0


def _block_bytes(namespace: Namespace) -> int:
    """Bytes of the pages of all blocks."""
    environment = namespace.scope.store.environment
    with environment.reading() as txn:
        pages: int = sum(Ref.decode(key, raw).pages for key, raw in txn.items(txn.db.refs))
    return pages * environment.page_bytes


BIG = Layout(
    (Stream("k", "u8", (64,)),),
    (State("big", "u8", (3 << 20,)), State("small", "f32", (5,)), State.opaque("blob", 5 << 20)),
    block_tokens=16,
)


def big_states(fill: int, blob: int) -> dict[str, Any]:
    """States of megabytes, every part of them different."""
    chance = np.random.default_rng(fill)
    return {
        "big": chance.integers(0, 256, 3 << 20, np.uint8),
        "small": chance.random(5, np.float32),
        "blob": chance.integers(0, 256, blob, np.uint8),
    }


@pytest.mark.parametrize("blob", [0, 1, 5 << 20])
def test_states_larger_than_a_transaction(path: Path, blob: int) -> None:
    """States that take several transactions come back whole, and only the last one makes their checkpoint."""
    with Store.open(path, max_bytes=64 << 20) as store:
        namespace = store.namespace(BIG)
        states = big_states(1, blob)
        namespace.save(TOKENS, session_rows(BIG, TOKENS), states=states)
        with namespace.lease(TOKENS) as lease:
            assert lease.length == 100
            assert states_equal(lease.states(), states)
            lease.validate()
        assert_sound(store)


def test_an_incomplete_checkpoint_is_not_matched(path: Path) -> None:
    """States of which pieces are missing don't exist for a match; completing a later checkpoint drops them, blocks and all."""
    from kvstore.records.states import pack_states, packed_states_bytes
    from kvstore.saving import StatesPiece, gather_states, publish_states
    from kvstore.scope import SaveUnderWay

    with Store.open(path, max_bytes=64 << 20) as store:
        namespace = store.namespace(BIG)
        prompt = np.array(TOKENS, "<u4").tobytes()
        namespace.save(TOKENS, session_rows(BIG, TOKENS))
        rows_only = store.stats().blocks
        states = big_states(2, 100)
        blocks = list(gather_states(namespace.scope, pack_states(BIG, states)))
        packed = packed_states_bytes(BIG, states)
        save = SaveUnderWay()
        publish_states(namespace.scope, prompt, StatesPiece(blocks[:1], packed, last=False), save)
        assert checkpoints_on(namespace, TOKENS) == []
        assert checkpoints_on(namespace, TOKENS, complete=False) == [100]
        assert namespace.match(TOKENS) is None
        assert_sound(store)
        # another save at the same position completes; what the first one left goes
        namespace.save(TOKENS, session_rows(BIG, TOKENS), states=big_states(3, 100))
        assert checkpoints_on(namespace, TOKENS, complete=False) == [100]
        with namespace.lease(TOKENS) as lease:
            assert states_equal(lease.states(), big_states(3, 100))
        [node] = all_nodes(namespace)
        assert store.stats().blocks == rows_only + len(node.checkpoints[0].ids)
        assert save.save_id > 0
        assert_sound(store)


def test_bounded_shapes_come_back_as_they_were(store: Store) -> None:
    """A window that isn't full, an empty one and opaque bytes of any length come back with exactly their shape."""
    namespace = store.namespace(hybrid_layout())
    for position in range(1, 16):
        tokens = [position, *TOKENS[: position - 1]]
        save(namespace, tokens)
        with namespace.lease(tokens) as lease:
            found = lease.states()
        expected = session_states(hybrid_layout(), tokens)
        assert {name: a.shape for name, a in found.items()} == {name: a.shape for name, a in expected.items()}
        assert states_equal(found, expected)


def test_states_belong_to_the_caller(store: Store) -> None:
    """The states of a lease are copies: writing to them changes nothing that is stored, and they outlive the lease."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        mine = lease.states()
    mine["r"][...] = 0
    assert_restores(namespace, TOKENS, 100)


def test_a_layout_of_states_alone(path: Path) -> None:
    """A recurrent model without any attention has states and no streams; it is restored at its checkpoints."""
    layout = Layout((), (State("r", "f32", (100,)),), block_tokens=16)
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        namespace.save(TOKENS[:50], {}, states=session_states(layout, TOKENS[:50]))
        namespace.save(TOKENS, {}, states=session_states(layout, TOKENS))
        assert_restores(namespace, TOKENS, 100)
        assert_restores(namespace, TOKENS[:99], 50)
        assert_sound(store)


def test_a_layout_without_states_ignores_none(store: Store) -> None:
    """Passing no states, or none by name, to a layout that has none is the same."""
    layout = Layout((Stream("k", "u8", (4,)),), block_tokens=16)
    namespace = store.namespace(layout)
    result = namespace.save(TOKENS, session_rows(layout, TOKENS), states={})
    assert not result.checkpoint
    assert_restores(namespace, TOKENS, 100)


@pytest.mark.parametrize("skew", [0, 1, 63])
def test_states_in_a_buffer_of_the_callers(store: Store, skew: int) -> None:
    """States go into a buffer that is given, at any address, are views of it, and nothing behind them is touched."""
    layout, tokens = hybrid_layout(), list(range(40))
    namespace = store.namespace(layout)
    save(namespace, tokens)
    with namespace.lease(tokens) as lease:
        buffer = np.full(lease.states_bytes + 200, 0xA5, np.uint8)
        for _ in range(2):  # it may be used again
            states = lease.states(into=buffer[skew:])
            assert states_equal(states, lease.states())
            assert all(np.shares_memory(array, buffer) for array in states.values() if array.size)
            assert set(buffer[lease.states_bytes + skew :].tobytes()) == {0xA5}


def test_buffers_that_states_do_not_fit_are_refused(store: Store) -> None:
    """A buffer that is too short, read-only, of another type or in pieces is refused before a byte moves."""
    layout, tokens = hybrid_layout(), list(range(40))
    namespace = store.namespace(layout)
    save(namespace, tokens)
    with namespace.lease(tokens) as lease:
        buffer = np.zeros(4 * lease.states_bytes, np.uint8)
        sealed = buffer.view()
        sealed.flags.writeable = False
        for into in (
            buffer[: lease.states_bytes - 1],
            sealed,
            buffer.view(np.int8),
            buffer[::2],
            buffer.reshape(2, -1),
            b"x" * 9999,
        ):
            with pytest.raises(ArrayError, match="states"):
                lease.states(into=into)  # type: ignore[arg-type]  # some are no arrays of bytes
        assert not buffer.any()
    with namespace.lease([5]) as lease:
        assert (lease.states_bytes, lease.states(into=buffer)) == (0, {})
