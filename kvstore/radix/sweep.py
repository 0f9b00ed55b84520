"""Setting the index right after damage: what nothing leads to goes, counts are taken anew, and no space is lost for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvstore import blocks as table
from kvstore.env import Writer
from kvstore.errors import IndexDamaged
from kvstore.radix import nodes
from kvstore.records.node import Node, child_key, decode_child, node_key

__all__ = ["Swept", "sweep"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has set right: records of the index removed, and reference counts corrected (0 removes a block)."""

    records: int
    counts: int


def sweep(txn: Writer) -> Swept:
    """Make all records agree, from the nodes that can be read. One pass over the small records, in one transaction.

    Nodes that can't be read go, with the records that lead to them; what lay below stays, is reached by nothing, ages and is
    evicted. Blocks go that no readable node refers to, and counts become what they should be.
    """
    readable, broken = _nodes(txn)
    records = len(broken)
    for number in broken:
        txn.delete(txn.db.nodes, node_key(number))
        txn.delete(txn.db.usage, node_key(number))
    records += _children(txn, readable)
    known = set(readable)
    used = set()
    stray = []
    for key, _ in txn.items(txn.db.usage, keys_only=True):
        used.add(int.from_bytes(key, "big"))
        if int.from_bytes(key, "big") not in known:
            stray.append(key)
    for key in stray:
        txn.delete(txn.db.usage, key)
    for number in known - used:
        nodes.touch(txn, number, 0)  # so that eviction finds it
    references: Counter[bytes] = Counter()
    for number in readable:
        references.update(nodes.load(txn, number).referenced())
    return Swept(records + len(stray), _counts(txn, references))


def _nodes(txn: Writer) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Parent and first token of each node that can be read, and the numbers of those that can't."""
    readable: dict[int, tuple[int, int]] = {}
    broken: list[int] = []
    for key, raw in txn.items(txn.db.nodes):
        number = int.from_bytes(key, "big")
        try:
            node = Node.decode(number, raw)
        except IndexDamaged:
            broken.append(number)
        else:
            readable[number] = (node.parent, node.first)
    return readable, broken


def _children(txn: Writer, readable: dict[int, tuple[int, int]]) -> int:
    """Remove the child records that lead to no node, or to another one than its record says."""
    wrong: list[bytes] = []
    for key, raw in txn.items(txn.db.children):
        try:
            child = decode_child(key, raw)
        except IndexDamaged:
            wrong.append(key)
            continue
        if child not in readable or child_key(*readable[child]) != key:
            wrong.append(key)
    for key in wrong:
        txn.delete(txn.db.children, key)
    return len(wrong)


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
    orphans = [key for key, _ in txn.items(txn.db.blocks, keys_only=True) if key not in counted]
    for key in orphans:
        table.set_count(txn, key, 0)
    return len(wrong) + len(orphans)
