"""Healing: what a save puts in the place of damage is what the prompt says there, and what a save acknowledges can be restored."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore import Namespace, Store
from kvstore.blocks import find, offset_of
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    child_at,
    data_file,
    examples,
    flip,
    hybrid_layout,
    plain_layout,
    restored,
    save,
)

from .index import nodes_on

A = list(range(100, 164))


def block_of(namespace: Namespace, tokens: list[int], index: int) -> bytes:
    """The id of a session's whole block, counted from its start."""
    joined = b"".join(node.blocks for node in nodes_on(namespace, tokens))
    return joined[32 * index : 32 * (index + 1)]


def refuse(store: Store, block: bytes) -> None:
    """Let the store believe that a block failed its checks."""
    scope = store._scope
    with scope.environment.reading() as txn:
        offset = offset_of(txn, block)
    scope.refuse(block, offset)


def lose(store: Store, block: bytes) -> None:
    """Take a block's reference record away."""
    with store._scope.environment.write(5.0) as txn:
        assert txn.delete(txn.db.refs, block)


@pytest.mark.parametrize("how", [refuse, lose])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_another_session_does_not_heal_with_its_own_rows(store: Store, how: object, index: int) -> None:
    """A block that can't be read is healed by a save that has its tokens, and left alone by one that has parted before its end."""
    namespace = store.namespace(plain_layout())
    save(namespace, A)
    assert callable(how)
    how(store, block_of(namespace, A, index))
    other = [*A[:20], *range(500, 544)]
    save(namespace, other)
    assert_restores(namespace, other, len(other))
    assert_restores(namespace, A, 16 * index)
    save(namespace, A)
    assert_restores(namespace, A, len(A))
    assert_restores(namespace, other, len(other))


@pytest.mark.parametrize("how", [refuse, lose])
@pytest.mark.parametrize("length", [49, 60, 63])
def test_a_prompt_that_ends_inside_a_lost_block_is_stored(store: Store, how: object, length: int) -> None:
    """Saving a prefix that ends inside a block which can't be read makes that prefix restorable, and its longer session stays."""
    namespace = store.namespace(plain_layout())
    save(namespace, A)
    assert callable(how)
    how(store, block_of(namespace, A, 3))
    result = save(namespace, A[:length])
    assert result.tokens == length
    assert_restores(namespace, A[:length], length)
    save(namespace, A)
    assert_restores(namespace, A, len(A))


@pytest.mark.parametrize("how", [refuse, lose])
def test_a_short_branch_off_a_lost_block_is_stored(store: Store, how: object) -> None:
    """A session that parts inside a block which can't be read, and ends in it, is stored with rows of its own."""
    namespace = store.namespace(plain_layout())
    save(namespace, A)
    assert callable(how)
    how(store, block_of(namespace, A, 1))
    branch = [*A[:20], *[4] * 5]
    save(namespace, branch)
    assert_restores(namespace, branch, len(branch))
    save(namespace, A)
    assert_restores(namespace, A, len(A))


def test_a_healed_block_is_not_refused_by_who_saw_it_bad(path: Path) -> None:
    """A process that met the damage before another one healed it does not mark the healed block when it writes or closes."""
    code = """
        store = Store.open(path)
        try:
            restored(store.namespace(plain_layout()), list(range(100, 164)))
        except errors.BlockDamaged:
            print("seen", flush=True)
        sys.stdin.readline()
        store.close()
        print("closed", flush=True)
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, A)
        block = block_of(namespace, A, 1)
        with store._scope.environment.reading() as txn:
            ref = find(txn, block)
        assert ref is not None
        flip(data_file(path), ref.offset + 3)
        with child_at(code, path) as other:
            refuse(store, block)
            save(namespace, A)
            assert_restores(namespace, A, len(A))
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline().strip() == "closed"
        assert store.stats().bad_blocks == 0
        assert_restores(namespace, A, len(A))


def test_random_refusals(tmp_path: Path) -> None:
    """Whatever is refused, saved, branched and evicted, in any order: no other byte comes back, and every save is restorable."""
    for seed in range(examples(25)):
        randomly = random.Random(seed)
        layout = randomly.choice([plain_layout(8), hybrid_layout(8), plain_layout(16)])
        with Store.open(tmp_path / str(seed), max_bytes=randomly.choice([CAP // 2, CAP])) as store:
            _random_refusals(store, store.namespace(layout), randomly)
            assert_sound(store)


def _random_refusals(store: Store, namespace: Namespace, randomly: random.Random) -> None:
    sessions = [[randomly.randrange(3) for _ in range(randomly.randrange(1, 50))]]
    for _ in range(40):
        step = randomly.random()
        if step < 0.6:
            base = randomly.choice(sessions)
            tokens = base[: randomly.randrange(len(base) + 1)] + [randomly.randrange(3) for _ in range(randomly.randrange(1, 30))]
            states = randomly.random() < 0.8
            sessions.append(tokens)
            save(namespace, tokens, states=states)
            if states or not namespace.layout.states:
                assert_restores(namespace, tokens, len(tokens))
        elif step < 0.75:
            with store._scope.environment.reading() as txn:
                stored = [key for key, _ in txn.items(txn.db.refs)]
            if stored:
                refuse(store, randomly.choice(stored))
        elif step < 0.82:
            namespace.evict(randomly.choice(sessions))
        elif step < 0.86:
            store.evict(free_bytes=randomly.randrange(400_000))
        for tokens in (randomly.choice(sessions), sessions[-1]):
            restored(namespace, tokens)
