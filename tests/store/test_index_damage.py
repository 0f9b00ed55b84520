"""Damaged records of the index: a shorter match, a save that goes on, or a named error; never other bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import Namespace, Store
from kvstore.blocks import find
from kvstore.records.meta import COUNTERS_KEY
from kvstore.records.node import child_key, encode_child, node_key
from tests.support import CAP, assert_restores, data_file, flip, plain_layout, restored_at_last, run_child, save, wide_layout

from .index import nodes_on

TOKENS = list(range(100))
OTHER = [*TOKENS[:40], *[7] * 20]


def _raw(namespace: Namespace, database: str, key: bytes) -> bytes:
    with namespace.scope.store.environment.reading() as txn:
        return bytes(dict(txn.items(getattr(txn.db, database)))[key])


def _ref(namespace: Namespace) -> bytes:
    block = nodes_on(namespace, TOKENS)[0].blocks[:32]
    with namespace.scope.store.environment.reading() as txn:
        ref = find(txn, block)
    assert ref is not None
    return ref.encode(block)


def _child(namespace: Namespace) -> bytes:
    upper, lower = nodes_on(namespace, TOKENS)
    return encode_child(child_key(upper.node, lower.first), lower.node)


RECORDS: dict[str, Callable[[Namespace], bytes]] = {
    "leaf": lambda namespace: nodes_on(namespace, TOKENS)[1].encode(),
    "inner node": lambda namespace: nodes_on(namespace, TOKENS)[0].encode(),
    "child": _child,
    "ref": _ref,
    "usage": lambda namespace: _raw(namespace, "usage", node_key(nodes_on(namespace, TOKENS)[1].node)),
}
VITAL: dict[str, Callable[[Namespace], bytes]] = {
    "counters": lambda namespace: _raw(namespace, "meta", COUNTERS_KEY),
    "namespace": lambda namespace: _raw(namespace, "namespaces", namespace.namespace_id),
}


def damage(path: Path, record: bytes) -> None:
    """Flip a byte in every copy of a record that the file has (pages that are free again hold old ones)."""
    data = data_file(path).read_bytes()
    at = data.find(record)
    assert at >= 0
    while at >= 0:
        flip(data_file(path), at + len(record) - 3)
        at = data.find(record, at + 1)


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_a_damaged_record_is_worked_around(path: Path, kind: str, reopened: bool) -> None:
    """Behind a damaged record a match is shorter, the next save makes the session whole, and evicting and turnover go on."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        save(namespace, OTHER)
        record = RECORDS[kind](namespace)
        if not reopened:
            damage(path, record)
            _goes_on(store)
    if reopened:
        damage(path, record)
        with Store.open(path) as store:
            _goes_on(store)


def _goes_on(store: Store) -> None:
    namespace = store.namespace(plain_layout())
    assert restored_at_last(namespace, TOKENS) in (0, 40, 100)
    assert restored_at_last(namespace, OTHER) in (0, 40, 60)
    store.verify(deep=True)
    for tokens in (TOKENS, OTHER):
        save(namespace, tokens)
        assert_restores(namespace, tokens, len(tokens))
    namespace.evict(TOKENS)
    save(namespace, TOKENS)
    assert_restores(namespace, TOKENS, 100)
    wide = store.namespace(wide_layout())
    for n in range(40):  # the whole store turns over
        save(wide, [n, *range(200)])
    assert store.stats().counters.evicted_nodes > 0
    save(namespace, TOKENS)
    assert_restores(namespace, TOKENS, 100)


EVICT_ALL = """
with Store.open(path) as store:
    store.namespace(plain_layout()).evict()
    save(store.namespace(plain_layout()), list(range(100)))
    assert_restores(store.namespace(plain_layout()), list(range(100)), 100)
    store.namespace(plain_layout()).evict()
    print(store.stats().nodes)
"""


@pytest.mark.parametrize("kind", ["leaf", "inner node", "child"])
def test_evicting_everything_comes_to_an_end(path: Path, kind: str) -> None:
    """Evicting a namespace goes past nodes that can't be read, instead of meeting the first of them for ever."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        save(namespace, OTHER)
        record = RECORDS[kind](namespace)
    damage(path, record)
    assert int(run_child(EVICT_ALL, path)) <= 2


@pytest.mark.parametrize("kind", sorted(VITAL))
def test_a_damaged_vital_record_is_made_anew(path: Path, kind: str) -> None:
    """A store that has lost its counters or a namespace's record loses no session, and the next save sets it right."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        damage(path, VITAL[kind](namespace))
        assert_restores(namespace, TOKENS, 100)
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        assert_restores(namespace, TOKENS, 100)  # a root says which namespace it stands for
        save(namespace, [8, 8, 8])
        save(namespace, TOKENS)
        assert_restores(namespace, [8, 8, 8], 3)
        assert_restores(namespace, TOKENS, 100)
        for n in range(40):  # what nothing leads to any more is evicted in its turn
            save(store.namespace(wide_layout()), [n, *range(200)])
        save(namespace, OTHER)
        assert_restores(namespace, OTHER, 60)
