"""Shrinking the index: removing leaves, from the ends of conversations up."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from kvstore import blocks as table
from kvstore.env import Writer
from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.radix import nodes, unfinished
from kvstore.radix.checkpoints import prune
from kvstore.radix.policy import CheckpointPolicy
from kvstore.records.node import Node, node_key

__all__ = ["Removed", "cut_node", "remove_leaf", "remove_point"]


_REFERENCES_AT_ONCE = 256  # 20 to 30 ms
_NODES_AT_ONCE = 64


@dataclass(slots=True)
class Removed:
    """What removing took out of the store.

    `references` counts the blocks that the nodes referred to: removing takes its time for them. `above` is the node that lost a
    child by it, 0 where that is the root.
    """

    nodes: int = 0
    tokens: int = 0
    pages: int = 0
    references: int = 0
    above: int = 0

    @property
    def enough(self) -> bool:
        """Whether one transaction should remove no more: others wait for the write lock meanwhile."""
        return self.references >= _REFERENCES_AT_ONCE or self.nodes >= _NODES_AT_ONCE

    def add(self, other: Removed) -> None:
        """Count another removal in."""
        self.nodes += other.nodes
        self.tokens += other.tokens
        self.pages += other.pages
        self.references += other.references


def remove_leaf(txn: Writer, node: Node) -> Removed:
    """Remove a node without children: its record, its usage, its references, and its parent's pointer to it.

    The parent inherits the last use: what a conversation's end was used for, its beginning was used for.
    """
    if nodes.has_children(txn, node.node):
        raise IndexDamaged(f"node {node.node} has children and cannot be removed")
    parent = _parent(txn, node)
    referenced = node.referenced()
    pages = sum(table.drop_reference(txn, block) for block in referenced)
    unfinished.forget(txn, node.checkpoints)
    usage = nodes.usage_of(txn, node.node)
    nodes.unlink(txn, node.parent, node.first, node.node)
    txn.delete(txn.db.nodes, node_key(node.node))
    txn.delete(txn.db.usage, node_key(node.node))
    if parent is not None and usage.last_use > nodes.usage_of(txn, parent.node).last_use:
        nodes.touch(txn, parent.node, usage.last_use)
    if node.parent == node.root and not nodes.has_children(txn, node.root):
        nodes.drop_root(txn, node.root)
    return Removed(1, node.end - node.start, pages, len(referenced))


def _parent(txn: Writer, node: Node) -> Node | None:
    """The node above, None below the root and for one that damage has cut off."""
    if node.parent == node.root:
        return None
    with contextlib.suppress(IndexDamaged):
        parent = nodes.load(txn, node.parent)
        if nodes.leads_to(txn, parent, node):
            return parent
    return None


def cut_node(txn: Writer, node: Node, position: int, block_tokens: int) -> Removed:
    """Take what lies at and behind a block boundary out of a path: everything below a node, and the node's own end.

    Parameters
    ----------
    position : int
        A block boundary before the node's end. At or before its start the node goes as a whole.
    """
    removed = Removed()
    while (below := next(nodes.children_of(txn, node.node), None)) is not None:
        while (deeper := next(nodes.children_of(txn, below), None)) is not None:
            below = deeper
        removed.add(remove_leaf(txn, nodes.load(txn, below)))
    if position <= node.start:
        removed.add(remove_leaf(txn, node))
        return removed
    shorter = node.replace(
        end=position,
        tokens=node.tokens[: 4 * (position - node.start)],
        blocks=node.blocks[: ID_BYTES * (position // block_tokens - node.start // block_tokens)],
        tail=b"",
        checkpoints=tuple(c for c in node.checkpoints if c.position <= position),
    )
    kept = Counter(shorter.referenced())
    for block in (Counter(node.referenced()) - kept).elements():
        removed.pages += table.drop_reference(txn, block)
    nodes.store(txn, shorter)
    removed.tokens += node.end - position
    return removed


def remove_point(
    txn: Writer, leaf: Node, *, has_states: bool, keep: frozenset[int], policy: CheckpointPolicy | None = None
) -> Removed:
    """Remove a leaf, and with it what became worthless by that.

    Without states that is the leaf alone. With states, rows behind the last usable checkpoint can't be restored, so the
    nodes above go too, up to the first that has a complete checkpoint, has other children or is in `keep`; of a very long
    session not all at once, but nothing is least recently used as much as the rest. Where a node is left one child, the
    checkpoints that only its branching has kept go by the namespace's `policy`; with none they stay.
    """
    above = _parent(txn, leaf)
    removed = remove_leaf(txn, leaf)
    while above is not None and not removed.enough:
        count = nodes.count_children(txn, above.node, 2)
        if count == 1 and policy is not None:
            references, pages = prune(txn, above.node, policy)
            removed.references += references
            removed.pages += pages
        if count or not has_states or above.node in keep or any(c.complete for c in above.checkpoints):
            break
        node, above = above, _parent(txn, above)
        removed.add(remove_leaf(txn, node))
    removed.above = 0 if above is None else above.node
    return removed
