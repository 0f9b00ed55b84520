"""Loading and storing nodes, the children that lead to them, and their usage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from kvstore.env import Reader, Writer
from kvstore.errors import IndexDamaged
from kvstore.records.meta import COUNTERS_KEY, Counters, NamespaceRecord, RootRecord
from kvstore.records.node import Node, Usage, child_key, decode_child, encode_child, node_key

__all__ = [
    "child_of",
    "children_of",
    "count_children",
    "drop_root",
    "drop_unreadable",
    "has_children",
    "leads_to",
    "link",
    "load",
    "new_node_id",
    "new_save_id",
    "now",
    "store",
    "touch",
    "unlink",
    "usage_from",
    "usage_of",
]


def now() -> int:
    """Microseconds since the epoch, the clock of `usage`."""
    return time.time_ns() // 1000


def load(txn: Reader | Writer, node: int) -> Node:
    """Load a node. Raises IndexDamaged when it isn't there or does not parse."""
    raw = txn.get(node_key(node), txn.db.nodes)
    if raw is None:
        raise IndexDamaged(f"the index refers to node {node}, which is not stored; verify the store")
    return Node.decode(node, raw)


def store(txn: Writer, node: Node) -> None:
    """Write a node's record."""
    txn.put(txn.db.nodes, node_key(node.node), node.encode())


def child_of(txn: Reader | Writer, parent: int, first: int) -> int | None:
    """The node whose edge leaves `parent` with this token."""
    key = child_key(parent, first)
    raw = txn.get(key, txn.db.children)
    return None if raw is None else decode_child(key, raw)


def link(txn: Writer, parent: int, first: int, node: int) -> None:
    """Make `node` the child of `parent` under this token."""
    key = child_key(parent, first)
    txn.put(txn.db.children, key, encode_child(key, node))


def children_of(txn: Reader | Writer, parent: int) -> Iterator[int]:
    """The ids of a node's children, in the order of their first tokens. One whose record is damaged is passed over."""
    prefix = node_key(parent)
    for key, raw in txn.items(txn.db.children, prefix):
        if not key.startswith(prefix):
            return
        with contextlib.suppress(IndexDamaged):
            yield decode_child(key, raw)


def has_children(txn: Reader | Writer, parent: int) -> bool:
    """Whether a node has a child."""
    return next(children_of(txn, parent), None) is not None


def count_children(txn: Reader | Writer, parent: int, most: int) -> int:
    """How many children a node has, counted up to `most`."""
    return sum(1 for _ in zip(range(most), children_of(txn, parent), strict=False))


def usage_of(txn: Reader | Writer, node: int) -> Usage:
    """When a node was last used; long ago when there is no record."""
    return usage_from(node, txn.get(node_key(node), txn.db.usage))


def usage_from(node: int, raw: bytes | None) -> Usage:
    """Decode a usage record; long ago when there is none or it is damaged: recency is not worth failing for."""
    try:
        return Usage(0, 0) if raw is None else Usage.decode(node, raw)
    except IndexDamaged:
        return Usage(0, 0)


def unlink(txn: Writer, parent: int, first: int, node: int) -> None:
    """Remove the record that leads from `parent` to `node`; one that leads elsewhere stays, a damaged one goes."""
    with contextlib.suppress(IndexDamaged):
        if child_of(txn, parent, first) != node:
            return  # damage above the node has cut it off, and another stands in its place
    txn.delete(txn.db.children, child_key(parent, first))


def drop_unreadable(txn: Writer, node: int) -> None:
    """Remove a node whose record can't be read, and what leads to it, which has to be looked for. Its blocks are swept later."""
    txn.damage = True
    for database in (txn.db.usage, txn.db.nodes):
        txn.delete(database, node_key(node))
    leading = []
    for key, raw in txn.items(txn.db.children):
        with contextlib.suppress(IndexDamaged):
            if decode_child(key, raw) == node:
                leading.append(key)
    for key in leading:
        txn.delete(txn.db.children, key)


def drop_root(txn: Writer, root: int) -> None:
    """Remove a namespace that has no session left, so that it costs nothing; the next save makes it anew."""
    key = node_key(root)
    raw = txn.get(key, txn.db.roots)
    if raw is None:
        return
    with contextlib.suppress(IndexDamaged):
        namespace = RootRecord.decode(root, raw).namespace
        named = txn.get(namespace, txn.db.namespaces)
        if named is not None and NamespaceRecord.decode(namespace, named).root == root:
            txn.delete(txn.db.namespaces, namespace)  # one that names another root by now is that one's
    txn.delete(txn.db.roots, key)


def leads_to(txn: Reader | Writer, parent: Node, node: Node) -> bool:
    """Whether an edge really goes on with another: not so where damage has cut a node off and another stands in its place."""
    with contextlib.suppress(IndexDamaged):
        return parent.end == node.start and child_of(txn, parent.node, node.first) == node.node
    return False


def touch(txn: Writer, node: int, last_use: int) -> None:
    """Note that a node was used; never moves its last use back."""
    usage = usage_of(txn, node)
    record = Usage(max(usage.last_use, last_use), usage.count + 1)
    txn.put(txn.db.usage, node_key(node), record.encode(node))


def _counters(txn: Writer) -> Counters:
    """The counters; where they are lost, numbers above all that are in use."""
    raw = txn.get(COUNTERS_KEY, txn.db.meta)
    try:
        if raw is not None:
            return Counters.decode(raw)
    except IndexDamaged:
        pass
    txn.damage = True
    databases = (txn.db.nodes, txn.db.roots, txn.db.usage, txn.db.children)
    used = max(int.from_bytes(txn.last_key(database)[: len(node_key(0))], "big") for database in databases)
    return Counters(used + 1, now())


def new_node_id(txn: Writer) -> int:
    """Hand out a node id that was never used before."""
    counters = _counters(txn)
    txn.put(txn.db.meta, COUNTERS_KEY, Counters(counters.next_node + 1, counters.next_save).encode())
    return counters.next_node


def new_save_id(txn: Writer) -> int:
    """Hand out a save id that was never used before."""
    counters = _counters(txn)
    txn.put(txn.db.meta, COUNTERS_KEY, Counters(counters.next_node, counters.next_save + 1).encode())
    return counters.next_save
