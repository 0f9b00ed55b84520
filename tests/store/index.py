"""A look into the index of a namespace, for tests that say how it has to be shaped."""

from __future__ import annotations

from kvstore import Namespace
from kvstore.blocks import find
from kvstore.ids import as_tokens
from kvstore.radix import walk
from kvstore.records.node import Node


def nodes_on(namespace: Namespace, tokens: list[int]) -> list[Node]:
    """Give the nodes that hold the longest stored prefix of a prompt."""
    scope = namespace.scope
    with scope.store.environment.reading() as txn:
        return walk(txn, scope.root(txn), as_tokens(tokens).astype("<u4").tobytes()).nodes


def spans(namespace: Namespace, tokens: list[int]) -> list[tuple[int, int]]:
    """Give where those nodes start and end."""
    return [(node.start, node.end) for node in nodes_on(namespace, tokens)]


def all_nodes(namespace: Namespace) -> list[Node]:
    """Give every node of a namespace."""
    scope = namespace.scope
    with scope.store.environment.reading() as txn:
        root = scope.root(txn)
        found = [Node.decode(int.from_bytes(key, "big"), raw) for key, raw in txn.items(txn.db.nodes)]
    return [node for node in found if node.root == root]


def count_of(namespace: Namespace, block: bytes) -> int:
    """Give how many references a block has; 0 when it isn't stored."""
    with namespace.scope.store.environment.reading() as txn:
        ref = find(txn, block)
    return 0 if ref is None else ref.count


def checkpoints_on(namespace: Namespace, tokens: list[int], *, complete: bool = True) -> list[int]:
    """Give the positions of the checkpoints on a path."""
    return [c.position for node in nodes_on(namespace, tokens) for c in node.checkpoints if c.complete or not complete]
