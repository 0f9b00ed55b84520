"""Checkpoints: where the states of a prefix are stored, and which of them are worth keeping.

The policy: each path keeps its two deepest (the turn's boundary, which a client that hides reasoning comes back to, and the
end of the answer), the one saved last, and the deepest at or before each node with several children (where another session may
branch off too).
The transaction that completes a newer one drops the others, and so does the eviction that leaves a node one child.
"""

from __future__ import annotations

from kvstore import blocks as table
from kvstore.env import Reader, Writer
from kvstore.errors import BaseLost, IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.radix import nodes
from kvstore.radix.walk import walk
from kvstore.records.node import Checkpoint, Node

__all__ = ["KEPT_PER_PATH", "add_blocks", "complete", "has_checkpoint", "prune"]

KEPT_PER_PATH = 2
_CHILDREN_LOOKED_AT = 32


def has_checkpoint(txn: Reader | Writer, root: int, prompt: bytes, bad: frozenset[bytes]) -> bool:
    """Whether a complete checkpoint is stored at exactly the prompt's end, with no block in `bad`."""
    path, position = walk(txn, root, prompt, tolerant=True), len(prompt) // 4
    return path.matched == position and any(c.position == position and bad.isdisjoint(c.ids) for _, c in path.checkpoints())


def add_blocks(txn: Writer, root: int, prompt: bytes, save_id: int, packed_bytes: int, ids: list[bytes], before: int) -> int:
    """Append blocks to the incomplete checkpoint of a save at the prompt's end, which is made if it isn't there.

    The caller has put the blocks and so holds the references that the checkpoint takes over; earlier calls have added
    `before` blocks. Returns the node.

    Raises
    ------
    BaseLost
        When the prompt isn't stored to its end any more, or, for a later piece, the earlier ones were evicted.
    """
    position = len(prompt) // 4
    path = walk(txn, root, prompt)
    if path.matched < position:
        raise BaseLost(f"the rows of {position} tokens were evicted while their states were being saved; save again")
    node = path.node_at(position)
    mine = next((c for c in node.checkpoints if c.position == position and c.save_id == save_id), None)
    earlier = b"" if mine is None else mine.blocks
    if len(earlier) != ID_BYTES * before:
        raise BaseLost(f"the states at position {position} were evicted while they were being saved; save again")
    mine = Checkpoint(position, save_id, False, packed_bytes, earlier + b"".join(ids))
    others = tuple(c for c in node.checkpoints if c.save_id != save_id or c.position != position)
    nodes.store(txn, node.replace(checkpoints=tuple(sorted((*others, mine), key=lambda c: (c.position, c.save_id)))))
    return node.node


def complete(txn: Writer, root: int, prompt: bytes, save_id: int, blocks: int) -> None:
    """Make the checkpoint of a save valid, and drop what it supersedes.

    A complete checkpoint that another save has made at this position meanwhile stays; ours goes. One with a block that is
    marked as bad is replaced. (Putting ours has cleared the mark where the bytes were the same: then that one is whole again.)

    Raises
    ------
    BaseLost
        When not all of its `blocks` are there any more.
    """
    position = len(prompt) // 4
    path = walk(txn, root, prompt)
    if path.matched < position:
        raise BaseLost(f"the rows of {position} tokens were evicted while their states were being saved; save again")
    node = path.node_at(position)
    mine = next((c for c in node.checkpoints if c.position == position and c.save_id == save_id), None)
    if mine is None or len(mine.ids) != blocks:
        raise BaseLost(f"the states at position {position} were evicted while they were being saved; save again")
    bad = table.bad_blocks(txn)
    there = [c for c in node.checkpoints if c.complete and c.position == position]
    first = any(bad.isdisjoint(c.ids) for c in there)
    done = () if first else (Checkpoint(position, save_id, True, mine.packed_bytes, mine.blocks),)
    stale = [mine] if first else there
    stale += [c for c in node.checkpoints if c is not mine and not c.complete and c.position <= position]
    kept = tuple(c for c in node.checkpoints if c is not mine and c not in stale)
    _drop(txn, stale)
    nodes.store(txn, node.replace(checkpoints=tuple(sorted((*kept, *done), key=lambda c: (c.position, c.save_id)))))
    prune(txn, node.node, newest=position)


def prune(txn: Writer, node: int, *, newest: int = 0) -> None:
    """Apply the policy to the path through a node: up to the root, and down as long as there is one way down.

    The checkpoint at `newest`, which has just been saved, stays wherever it is: somebody goes on from there.
    Best effort: where a record of the path is damaged, everything is kept. What the policy drops is space, not safety.
    """
    try:
        path = _path_through(txn, node)
    except IndexDamaged:
        return
    found = [(place, c) for place, n in enumerate(path) for c in n.checkpoints if c.complete]
    keep = {newest, *(c.position for _, c in found[-KEPT_PER_PATH:])}
    for place, n in enumerate(path):
        if nodes.count_children(txn, n.node, 2) > 1:
            before = [c.position for _, c in found if c.position <= n.end]
            on_path = path[place + 1].node if place + 1 < len(path) else 0
            keep.update(before[-_kept_at_branch(txn, n.node, on_path) :])
    for n in path:
        stale = [c for c in n.checkpoints if c.complete and c.position not in keep]
        if stale:
            _drop(txn, stale)
            nodes.store(txn, n.replace(checkpoints=tuple(c for c in n.checkpoints if c not in stale)))


def _kept_at_branch(txn: Writer, branch: int, on_path: int) -> int:
    """How many checkpoints at or before a branch its other paths need to have two each."""
    for looked_at, child in enumerate(nodes.children_of(txn, branch)):
        if looked_at == _CHILDREN_LOOKED_AT:
            return KEPT_PER_PATH
        if child != on_path and not _checkpoint_below(txn, child):
            return KEPT_PER_PATH
    return 1


def _checkpoint_below(txn: Writer, node: int) -> bool:
    """Whether there is a complete checkpoint at a node or along the single way down from it; not behind damage."""
    while True:
        try:
            checkpoints = nodes.load(txn, node).checkpoints
        except IndexDamaged:
            return False
        if any(c.complete for c in checkpoints):
            return True
        below = [child for _, child in zip(range(2), nodes.children_of(txn, node), strict=False)]
        if len(below) != 1:
            return False
        node = below[0]


def _path_through(txn: Writer, node: int) -> list[Node]:
    path = [nodes.load(txn, node)]
    while path[0].parent != path[0].root:
        parent = nodes.load(txn, path[0].parent)
        if not nodes.leads_to(txn, parent, path[0]):
            break  # cut off by damage: what is above belongs to others
        path.insert(0, parent)
    while True:
        below = [child for _, child in zip(range(2), nodes.children_of(txn, path[-1].node), strict=False)]
        if len(below) != 1:
            return path
        path.append(nodes.load(txn, below[0]))


def _drop(txn: Writer, checkpoints: list[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        for block in checkpoint.ids:
            table.drop_reference(txn, block)
