"""Setting the index right after damage: what nothing leads to goes, counts are taken anew, and no space is lost for ever."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from kvstore import blocks as table
from kvstore.env import Reader, Writer
from kvstore.errors import IndexDamaged
from kvstore.radix import nodes, unfinished
from kvstore.records.block import Ref
from kvstore.records.meta import SWEEP_KEY
from kvstore.records.node import Checkpoint, Node, child_key, decode_child, node_key

__all__ = ["Disagreements", "Swept", "find_disagreements", "set_right", "sweep"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has set right: records of the index removed, and reference counts corrected (0 removes a block)."""

    records: int
    counts: int


@dataclass(slots=True)
class Disagreements:
    """What is to be done so that all records agree.

    Attributes
    ----------
    nodes, children, usage, bad, notes : list of bytes
        Keys of records that go, by database; of `meta` those of notes of saves.
    unused : list of int
        Nodes without a usage record.
    roots : list of int
        Namespaces that hold nothing.
    unfinished : list of tuple
        Nodes, and their incomplete checkpoints that no save is noted for.
    counts : dict
        Right reference counts, where a block's isn't.
    """

    nodes: list[bytes] = field(default_factory=list)
    children: list[bytes] = field(default_factory=list)
    usage: list[bytes] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    unfinished: list[tuple[int, list[Checkpoint]]] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)
    counts: dict[bytes, int] = field(default_factory=dict)


def sweep(txn: Writer) -> Swept:
    """Make all records agree, in one transaction: what `find_disagreements` finds is set right."""
    return set_right(txn, find_disagreements(txn))


def find_disagreements(txn: Reader | Writer) -> Disagreements:
    """Look for what doesn't agree, from the nodes that can be read and reached. One pass over the small records.

    Nodes that can't be read go, with what lay below them; so do child records that lead to no node, namespaces that hold nothing,
    incomplete checkpoints that no save is noted for, notes of saves without one, and blocks that no node refers to. Counts
    become what they should be.
    """
    found = Disagreements()
    edges, strays = _edges(txn)
    kept = _reached(txn, edges)
    found.nodes = strays + [node_key(number) for number in edges if number not in kept]
    found.children = _wrong_children(txn, edges, kept)
    known = {node_key(number) for number in kept}
    used = {key for key, _ in txn.items(txn.db.usage, keys_only=True)}
    found.usage = sorted(used - known)
    found.unused = sorted(int.from_bytes(key, "big") for key in known - used)
    live = {edges[number].root for number in kept}
    roots = [int.from_bytes(key, "big") for key, _ in txn.items(txn.db.roots, keys_only=True)]
    found.roots = [root for root in roots if root not in live]
    _wrong_counts(txn, _references(txn, kept, found), found)
    return found


def set_right(txn: Writer, found: Disagreements) -> Swept:
    """Do what has been found. Nobody may have written in between."""
    for key in found.nodes:
        txn.delete(txn.db.nodes, key)
    for key in found.children:
        txn.delete(txn.db.children, key)
    for key in found.usage:
        txn.delete(txn.db.usage, key)
    for number in found.unused:
        nodes.touch(txn, number, 0)  # so that eviction finds it
    for root in found.roots:
        nodes.drop_root(txn, root)
    for number, lost in found.unfinished:
        node = nodes.load(txn, number)
        nodes.store(txn, node.replace(checkpoints=tuple(c for c in node.checkpoints if c not in lost)))
    for key in found.notes:
        txn.delete(txn.db.meta, key)
    for key in found.bad:
        txn.delete(txn.db.bad, key)
    for key, count in found.counts.items():
        table.set_count(txn, key, count)
    txn.delete(txn.db.meta, SWEEP_KEY)
    txn.damage = False
    records = (
        len(found.nodes) + len(found.children) + len(found.usage) + len(found.roots) + len(found.unfinished) + len(found.notes)
    )
    return Swept(records, len(found.counts))


@dataclass(frozen=True, slots=True)
class _Edge:
    """What of a node says where it hangs."""

    parent: int
    root: int
    first: int
    start: int
    end: int


def _edges(txn: Reader | Writer) -> tuple[dict[int, _Edge], list[bytes]]:
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


def _reached(txn: Reader | Writer, edges: dict[int, _Edge]) -> set[int]:
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


def _wrong_children(txn: Reader | Writer, edges: dict[int, _Edge], kept: set[int]) -> list[bytes]:
    """The child records that lead to no node that is kept, or not the way it hangs."""
    wrong: list[bytes] = []
    for key, raw in txn.items(txn.db.children):
        try:
            child = decode_child(key, raw)
        except IndexDamaged:
            wrong.append(key)
            continue
        if child not in kept or child_key(edges[child].parent, edges[child].first) != key:
            wrong.append(key)
    return wrong


def _references(txn: Reader | Writer, kept: set[int], found: Disagreements) -> Counter[bytes]:
    """How often nodes refer to each block, without the incomplete checkpoints that have no note; those are found, and the reverse.

    A save that goes on and finds its checkpoint dropped starts over.
    """
    notes = dict(unfinished.noted(txn))
    wanted = {(r.save_id, r.node, r.position) for r in notes.values() if r is not None}
    references: Counter[bytes] = Counter()
    there: set[tuple[int, int, int]] = set()
    for number in kept:
        node = nodes.load(txn, number)
        references.update(node.referenced())
        lost = [c for c in unfinished.incomplete(node) if (c.save_id, number, c.position) not in wanted]
        if lost:
            found.unfinished.append((number, lost))
            references.subtract(block for checkpoint in lost for block in checkpoint.ids)
        there.update((c.save_id, number, c.position) for c in unfinished.incomplete(node))
    found.notes = [key for key, r in notes.items() if r is None or (r.position and (r.save_id, r.node, r.position) not in there)]
    return references


def _wrong_counts(txn: Reader | Writer, references: Counter[bytes], found: Disagreements) -> None:
    counted, stuck = set(), set()
    for key, raw in txn.items(txn.db.refs):
        counted.add(key)
        try:
            count = Ref.decode(key, raw).count
        except IndexDamaged:
            found.counts[key] = references[key]
            continue
        if count != references[key]:
            found.counts[key] = references[key]
        elif not count:
            stuck.add(key)  # its bytes can't be freed: it was tried
    found.bad = [key for key, _ in txn.items(txn.db.bad, keys_only=True) if not references[key] and key not in stuck]
    found.counts.update((key, 0) for key, _ in txn.items(txn.db.blocks, keys_only=True) if key not in counted)
