"""Where two sessions part: splits at the exact token, with a counted tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Layout, Store, Stream
from tests.support import assert_restores, assert_sound, plain_layout, save, wide_layout

from .index import all_nodes, count_of, nodes_on, spans

SIZE = 16
COMMON = list(range(100, 140))  # two blocks and half of a third


def test_a_first_session_is_one_edge(store: Store) -> None:
    """A session is one node with its whole blocks and a tail; the same session saved again changes nothing."""
    namespace = store.namespace(plain_layout())
    first = save(namespace, COMMON)
    assert (first.stored_tokens, first.new_tokens, first.new_blocks) == (0, 40, 3)
    [node] = nodes_on(namespace, COMMON)
    assert (node.start, node.end, len(node.blocks) // 32) == (0, 40, 2)
    assert node.tail
    assert [count_of(namespace, block) for block in node.referenced()] == [1, 1, 1]
    again = save(namespace, COMMON)
    assert (again.stored_tokens, again.new_tokens, again.new_blocks, again.written_bytes) == (40, 0, 0, 0)
    assert nodes_on(namespace, COMMON) == [node]


def test_divergence_inside_a_block(store: Store) -> None:
    """Two sessions that part inside a block: the common part becomes a node whose tail is a counted reference to that block."""
    namespace = store.namespace(plain_layout())
    a, b = [*COMMON, *[1] * 20], [*COMMON, *[2] * 20]
    save(namespace, a)
    [before] = nodes_on(namespace, a)
    result = save(namespace, b)
    assert result.stored_tokens == 40
    assert spans(namespace, a) == spans(namespace, b) == [(0, 40), (40, 60)]
    upper, lower = nodes_on(namespace, a)
    assert lower.node == before.node  # the lower part keeps its id
    shared = lower.blocks[:32]
    assert upper.tail == shared
    assert count_of(namespace, shared) == 2
    other = nodes_on(namespace, b)[1]
    assert other.blocks[:32] != shared  # the new branch's first block is saved whole, from its aligned start
    assert_restores(namespace, a, 60)
    assert_restores(namespace, b, 60)
    assert_restores(namespace, [*COMMON, 3], 40)
    assert_restores(namespace, COMMON[:37], 37)


def test_divergence_inside_a_block_whose_sibling_is_evicted(store: Store) -> None:
    """When one branch goes, the common part keeps its rows inside the shared block, and the other branch loses nothing."""
    namespace = store.namespace(plain_layout())
    a, b = [*COMMON, *[1] * 20], [*COMMON, *[2] * 20]
    save(namespace, a)
    save(namespace, b)
    shared = nodes_on(namespace, a)[1].blocks[:32]
    result = namespace.evict(a)
    assert (result.nodes, result.tokens) == (1, 20)
    assert count_of(namespace, shared) == 1
    assert_restores(namespace, a, 40)
    assert_restores(namespace, b, 60)
    assert_sound(store)
    namespace.evict(b)
    assert_restores(namespace, b, 0)
    assert count_of(namespace, shared) == 0
    assert store.stats().blocks == 0


def test_the_common_part_grows_again_after_its_branches_went(store: Store) -> None:
    """A node left with a counted tail that holds more rows than it needs is extended with its own rows."""
    namespace = store.namespace(plain_layout())
    a, b = [*COMMON, *[1] * 20], [*COMMON[:35], *[2] * 20]
    save(namespace, a)
    save(namespace, b)  # [0, 35) with a's third block as its tail
    namespace.evict(b)
    with_tail = nodes_on(namespace, a)[0]
    assert with_tail.end == 35
    assert_restores(namespace, b, 35)
    save(namespace, b)
    namespace.evict(a)
    assert_restores(namespace, b, 55)
    assert_restores(namespace, a, 35)


def test_divergence_at_a_block_boundary(store: Store) -> None:
    """Sessions that part at a block boundary share whole blocks and no tail."""
    namespace = store.namespace(plain_layout())
    a, b = [*COMMON[:32], *[1] * 20], [*COMMON[:32], *[2] * 20]
    save(namespace, a)
    save(namespace, b)
    upper = nodes_on(namespace, a)[0]
    assert (upper.start, upper.end, len(upper.blocks) // 32, upper.tail) == (0, 32, 2, b"")
    assert [count_of(namespace, block) for block in upper.referenced()] == [1, 1]
    assert_restores(namespace, a, 52)
    assert_restores(namespace, b, 52)
    namespace.evict(b)
    assert_restores(namespace, b, 32)


def test_divergence_at_the_first_token(store: Store) -> None:
    """Sessions without a common token are two first edges."""
    namespace = store.namespace(plain_layout())
    save(namespace, [1] * 20)
    save(namespace, [2] * 20)
    assert spans(namespace, [1] * 20) == spans(namespace, [2] * 20) == [(0, 20)]
    assert namespace.match([3]) is None


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 32, 39])
def test_a_session_that_is_a_prefix_of_another(store: Store, cut: int) -> None:
    """A stored session's prefix is stored already, at any token, and saving it adds nothing."""
    namespace = store.namespace(plain_layout())
    save(namespace, COMMON)
    result = save(namespace, COMMON[:cut])
    assert (result.stored_tokens, result.new_tokens, result.written_bytes) == (cut, 0, 0)
    assert spans(namespace, COMMON) == [(0, 40)]
    assert_restores(namespace, COMMON[:cut], cut)


def test_a_split_of_a_split_of_a_split(store: Store) -> None:
    """Sessions that part at every token inside the same two blocks all keep exactly their rows, in whatever order they go."""
    namespace = store.namespace(plain_layout())
    sessions = [[*COMMON[:cut], 7, *range(cut)] for cut in range(1, 40, 3)]
    for tokens in sessions:
        save(namespace, tokens)
    assert_sound(store)
    while sessions:
        namespace.evict(sessions.pop(len(sessions) // 2))
        assert_sound(store)
        for tokens in sessions:
            assert_restores(namespace, tokens, len(tokens))
    assert store.stats().blocks == 0


def test_extension_in_place_adds_no_nodes(store: Store) -> None:
    """A conversation that grows by a hundred turns stays one node, each turn rewrites one tail and no whole block."""
    namespace = store.namespace(plain_layout())
    tokens: list[int] = []
    for turn in range(100):
        tokens += [turn, *range(turn % 9)]
        result = save(namespace, tokens, start=(len(tokens) - 1 - turn % 9) // SIZE * SIZE)
        assert result.new_tokens == 1 + turn % 9
    assert spans(namespace, tokens) == [(0, len(tokens))]
    assert store.stats().nodes == 1
    assert store.stats().blocks == -(-len(tokens) // SIZE)
    assert_restores(namespace, tokens, len(tokens))


def test_a_branch_is_not_extended_over_its_children(store: Store) -> None:
    """A node with children keeps its end: what goes on from there in another way becomes a child."""
    namespace = store.namespace(plain_layout())
    for last in (1, 2, 3):
        save(namespace, [*COMMON, *[last] * 5])
    assert spans(namespace, [*COMMON, *[3] * 5]) == [(0, 40), (40, 45)]
    assert len(all_nodes(namespace)) == 4


def test_chained_nodes_of_a_long_session(path: Path) -> None:
    """20,000 tokens are a few chained nodes that start on block boundaries, each record small enough to stay inside a leaf page."""
    layout = Layout((Stream("k", "u8", (8,)),), block_tokens=128)
    tokens = [n * 2654435761 % (1 << 32) for n in range(20_000)]
    with Store.open(path, max_bytes=64 << 20) as store:
        namespace = store.namespace(layout)
        save(namespace, tokens[:11_111])
        save(namespace, tokens)
        chain = nodes_on(namespace, tokens)
        assert 5 <= len(chain) <= 10
        assert [n.start for n in chain[1:]] == [n.end for n in chain[:-1]]
        assert all(n.start % 128 == 0 for n in chain)
        assert all(len(n.encode()) <= 16358 for n in chain)
        assert chain[-1].end == 20_000
        assert_restores(namespace, tokens, 20_000)
        branch = [*tokens[:9_999], 1, 2, 3]
        save(namespace, branch)
        assert_restores(namespace, branch, 10_002)
        assert_restores(namespace, tokens, 20_000)
        assert_sound(store)
        namespace.evict(tokens)
        assert_restores(namespace, tokens, 9_999)
        assert_sound(store)


def test_a_block_of_more_tokens_than_an_edge_has_room_for(path: Path) -> None:
    """Blocks of so many tokens that an edge of one does not fit a leaf page work all the same."""
    layout = Layout((Stream("k", "u8", (1,)),), block_tokens=8192)
    tokens = [n % 251 for n in range(20_000)]
    with Store.open(path, max_bytes=16 << 20) as store:
        namespace = store.namespace(layout)
        for end in (5, 8191, 8192, 8193, 16_500, 20_000):
            save(namespace, tokens[:end])
            assert_restores(namespace, tokens, end)
        assert_sound(store)


def test_a_wide_block(store: Store) -> None:
    """Blocks of hundreds of kilobytes are shared and split like small ones."""
    namespace = store.namespace(wide_layout())
    a, b = [*range(150)], [*range(100), *[9] * 50]
    save(namespace, a)
    save(namespace, b)
    assert_restores(namespace, a, 150)
    assert_restores(namespace, b, 150)
