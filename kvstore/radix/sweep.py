"""Setting the index right after damage: what nothing leads to goes, counts are taken anew, and no space is lost for ever."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from kvstore import blocks as table
from kvstore.env import Writer
from kvstore.errors import IndexDamaged
from kvstore.radix import nodes, unfinished
from kvstore.records.meta import SWEEP_KEY
from kvstore.records.node import Node, child_key, decode_child, node_key

__all__ = ["Swept", "sweep"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has set right: records of the index removed, and reference counts corrected (0 removes a block)."""

    records: int
    counts: int


def sweep(txn: Writer) -> Swept:
    """Make all records agree, from the nodes that can be read and reached. One pass over the small records, in one transaction.

    Nodes that can't be read go, with what lay below them; so do child records that lead to no node, namespaces that hold nothing,
    incomplete checkpoints that no save is noted for, notes of saves without one, and blocks that no node refers to. Counts
    become what they should be.
    """
    edges, strays = _edges(txn)
    kept = _reached(txn, edges)
    strays += [node_key(number) for number in edges if number not in kept]
    for key in strays:
        txn.delete(txn.db.nodes, key)
        txn.delete(txn.db.usage, key)
    records = len(strays) + _children(txn, edges, kept)
    known = {node_key(number) for number in kept}
    used = {key for key, _ in txn.items(txn.db.usage, keys_only=True)}
    for key in used - known:
        txn.delete(txn.db.usage, key)
    for key in known - used:
        nodes.touch(txn, int.from_bytes(key, "big"), 0)  # so that eviction finds it
    references, notes = _references(txn, kept)
    records += len(used - known) + _roots(txn, {edges[number].root for number in kept}) + notes
    counts = _counts(txn, references)
    txn.delete(txn.db.meta, SWEEP_KEY)
    return Swept(records, counts)


@dataclass(frozen=True, slots=True)
class _Edge:
    """What of a node says where it hangs."""

    parent: int
    root: int
    first: int
    start: int
    end: int


def _edges(txn: Writer) -> tuple[dict[int, _Edge], list[bytes]]:
    """Where each node hangs that can be read, and the keys of those that can't be."""
    edges: dict[int, _Edge] = {}
    strays: list[bytes] = []
    for key, raw in txn.items(txn.db.nodes):
        try:
            if len(key) != len(node_key(0)):
                raise IndexDamaged("not the key of a node")
            node = Node.decode(int.from_bytes(key, "big"), raw)
        except IndexDamaged:
            strays.append(key)
        else:
            edges[node.node] = _Edge(node.parent, node.root, node.first, node.start, node.end)
    return edges, strays


def _reached(txn: Writer, edges: dict[int, _Edge]) -> set[int]:
    """The nodes to which child records lead all the way from a root that stands for a namespace."""
    reached: set[int] = set()
    for number, edge in sorted(edges.items(), key=lambda item: item[1].start):  # parents before their children
        above = edges.get(edge.parent)
        if edge.parent == edge.root:
            hangs = edge.start == 0 and txn.get(node_key(edge.root), txn.db.roots) is not None
        else:
            hangs = edge.parent in reached and above is not None and (above.end, above.root) == (edge.start, edge.root)
        with contextlib.suppress(IndexDamaged):
            if hangs and nodes.child_of(txn, edge.parent, edge.first) == number:
                reached.add(number)
    return reached


def _children(txn: Writer, edges: dict[int, _Edge], kept: set[int]) -> int:
    """Remove the child records that lead to no node that is kept, or not the way it hangs."""
    wrong: list[bytes] = []
    for key, raw in txn.items(txn.db.children):
        try:
            child = decode_child(key, raw)
        except IndexDamaged:
            wrong.append(key)
            continue
        if child not in kept or child_key(edges[child].parent, edges[child].first) != key:
            wrong.append(key)
    for key in wrong:
        txn.delete(txn.db.children, key)
    return len(wrong)


def _roots(txn: Writer, live: set[int]) -> int:
    """Remove namespaces that hold nothing any more."""
    empty = [key for key, _ in txn.items(txn.db.roots, keys_only=True) if int.from_bytes(key, "big") not in live]
    for key in empty:
        nodes.drop_root(txn, int.from_bytes(key, "big"))
    return len(empty)


def _references(txn: Writer, kept: set[int]) -> tuple[Counter[bytes], int]:
    """How often nodes refer to each block, once no incomplete checkpoint is without a note, nor the other way round.

    A save that goes on and finds its checkpoint dropped starts over.
    """
    notes = dict(unfinished.noted(txn))
    wanted = {(r.save_id, r.node, r.position) for r in notes.values() if r is not None}
    references: Counter[bytes] = Counter()
    found: set[tuple[int, int, int]] = set()
    changed = 0
    for number in kept:
        node = nodes.load(txn, number)
        lost = [c for c in unfinished.incomplete(node) if (c.save_id, number, c.position) not in wanted]
        if lost:
            node = node.replace(checkpoints=tuple(c for c in node.checkpoints if c not in lost))
            nodes.store(txn, node)
            changed += len(lost)
        found.update((c.save_id, number, c.position) for c in unfinished.incomplete(node))
        references.update(node.referenced())
    for key, record in notes.items():
        if record is None or (record.save_id, record.node, record.position) not in found:
            txn.delete(txn.db.meta, key)
            changed += 1
    return references, changed


def _counts(txn: Writer, references: Counter[bytes]) -> int:
    wrong = []
    counted = set()
    for key, _ in txn.items(txn.db.refs, keys_only=True):
        counted.add(key)
        try:
            ref = table.find(txn, key)
        except IndexDamaged:
            wrong.append(key)
            continue
        if ref is not None and ref.count != references[key]:
            wrong.append(key)
    for key in wrong:
        table.set_count(txn, key, references[key])
    for key in [key for key, _ in txn.items(txn.db.bad, keys_only=True) if not references[key]]:
        txn.delete(txn.db.bad, key)
    orphans = [key for key, _ in txn.items(txn.db.blocks, keys_only=True) if key not in counted]
    for key in orphans:
        table.set_count(txn, key, 0)
    return len(wrong) + len(orphans)
