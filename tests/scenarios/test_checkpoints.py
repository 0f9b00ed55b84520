"""A session with states at three positions, grown, branched, evicted: which checkpoints remain at each step."""

from __future__ import annotations

from kvstore import Store
from tests.store.index import checkpoints_on, spans
from tests.support import assert_restores, assert_sound, hybrid_layout, save

TOKENS = list(range(100))
OTHER = [*TOKENS[:60], *range(500, 540)]  # parts inside a block, between the checkpoints at 50 and at 70


def test_states_at_three_positions(store: Store) -> None:
    """Two deepest on each path, one at or before each branch, and no block of states that no path needs."""
    namespace = store.namespace(hybrid_layout())

    def has(tokens: list[int], positions: list[int], blocks: int) -> None:
        assert checkpoints_on(namespace, tokens, complete=False) == positions
        for position in positions:
            assert_restores(namespace, tokens[:position], position)
        assert store.stats().blocks == blocks
        assert_sound(store)

    # saved at three positions: the first is superseded
    for position, left in ((20, [20]), (50, [20, 50]), (70, [50, 70])):
        save(namespace, TOKENS[:position])
        has(TOKENS, left, -(-position // 16) + len(left))
    # grown: rows alone supersede nothing, states do
    save(namespace, TOKENS[:80], states=False)
    has(TOKENS, [50, 70], 5 + 2)
    save(namespace, TOKENS[:80])
    has(TOKENS, [70, 80], 5 + 2)
    # branched at 60, before any checkpoint: the rows of [0, 60) are shared, and there is nothing to go on from
    assert_restores(namespace, OTHER, 0)
    save(namespace, OTHER[:90])
    assert spans(namespace, OTHER) == [(0, 60), (60, 90)]
    has(TOKENS, [70, 80], 5 + 3 + 3)  # whole blocks from 48 on are the branch's own: three
    has(OTHER, [90], 11)
    # a state where they part: the deepest that both have, and kept however far the two go on
    save(namespace, TOKENS[:60])
    has(OTHER, [60, 90], 12)
    for position in (95, 100):
        save(namespace, OTHER[:position])
        save(namespace, TOKENS[:position])
    has(OTHER, [60, 95, 100], 7 + 4 + 5)
    has(TOKENS, [60, 95, 100], 16)
    # a branch that has no checkpoint of its own needs two where it parts
    third = [*TOKENS[:60], *range(700, 710)]
    save(namespace, third, states=False)
    has(third, [60], 18)
    assert_restores(namespace, third, 60)
    # evicted: each path goes with its own states; once nothing branches off, the one at the branch goes too
    namespace.evict(third)
    namespace.evict(OTHER)
    assert_restores(namespace, OTHER, 0)
    has(TOKENS, [95, 100], 7 + 2)
    # the last one: all of it
    assert namespace.evict(TOKENS).tokens == 100
    assert store.stats().blocks == 0
