"""Checkpoints: where the states of a prefix are stored, and dropping those that a policy does not keep."""

from __future__ import annotations

from kvstore import blocks as table
from kvstore.env import Reader, Writer
from kvstore.errors import BaseLost, IndexDamaged
from kvstore.radix import nodes, unfinished
from kvstore.radix.policy import CheckpointPolicy
from kvstore.radix.walk import walk
from kvstore.records.node import Checkpoint, Node

__all__ = ["add_blocks", "complete", "has_checkpoint", "place", "prune"]

_CHILDREN_LOOKED_AT = 32


def has_checkpoint(txn: Reader | Writer, root: int, prompt: bytes, bad: frozenset[bytes]) -> bool:
    """Whether a complete checkpoint is stored at exactly the prompt's end, with no block in `bad`."""
    path, position = walk(txn, root, prompt, tolerant=True), len(prompt) // 4
    return path.matched == position and any(c.position == position and bad.isdisjoint(c.ids) for _, c in path.checkpoints())


def place(txn: Writer, root: int, prompt: bytes, save_id: int, before: int) -> Node | None:
    """The node at whose end, or inside of which, a save's states are to go on.

    None where another save has completed the checkpoint meanwhile: the states are stored, and what this one has written of
    them is dropped.

    Parameters
    ----------
    before : int
        Blocks of states that earlier transactions of the save have added.

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
    mine = _of_save(node, position, save_id)
    if _stored_by_another(txn, node, position):
        if mine is not None:
            _drop(txn, [mine])
            nodes.store(txn, node.replace(checkpoints=tuple(c for c in node.checkpoints if c is not mine)))
        return None
    if (0 if mine is None else len(mine.ids)) != before:
        raise BaseLost(f"the states at position {position} were evicted while they were being saved; save again")
    return node


def add_blocks(txn: Writer, node: Node, position: int, save_id: int, packed_bytes: int, ids: list[bytes]) -> Node:
    """Append blocks to the incomplete checkpoint of a save at a node that `place` gave; it is made if it isn't there.

    The caller has put the blocks and so holds the references that the checkpoint takes over.
    """
    mine = _of_save(node, position, save_id)
    longer = Checkpoint(position, save_id, False, packed_bytes, (b"" if mine is None else mine.blocks) + b"".join(ids))
    changed = _with(node, [c for c in node.checkpoints if c is not mine], [longer])
    nodes.store(txn, changed)
    return changed


def complete(txn: Writer, node: Node, position: int, save_id: int, policy: CheckpointPolicy) -> None:
    """Make the checkpoint of a save, to which all blocks were added, valid, and drop what it supersedes.

    Where putting its blocks has healed one that another save had completed, that one stays and ours goes; one with a block
    that is marked as bad is replaced. What other saves have written of the same states goes.
    """
    mine = _of_save(node, position, save_id)
    if mine is None:
        raise IndexDamaged(f"node {node.node} holds no checkpoint of save {save_id} at position {position}")
    first = _stored_by_another(txn, node, position)
    done = [] if first else [Checkpoint(position, save_id, True, mine.packed_bytes, mine.blocks)]
    there = [c for c in node.checkpoints if c.position == position and c is not mine]
    stale = [c for c in there if not (first and c.complete)]
    _drop(txn, [*stale, mine] if first else stale)
    unfinished.forget(txn, [mine])
    nodes.store(txn, _with(node, [c for c in node.checkpoints if c is not mine and c not in stale], done))
    prune(txn, node.node, policy, newest=position)


def _of_save(node: Node, position: int, save_id: int) -> Checkpoint | None:
    return next((c for c in node.checkpoints if c.position == position and c.save_id == save_id and not c.complete), None)


def _stored_by_another(txn: Writer, node: Node, position: int) -> bool:
    bad = table.bad_blocks(txn)
    return any(c.complete and c.position == position and bad.isdisjoint(c.ids) for c in node.checkpoints)


def _with(node: Node, kept: list[Checkpoint], added: list[Checkpoint]) -> Node:
    return node.replace(checkpoints=tuple(sorted((*kept, *added), key=lambda c: (c.position, c.save_id))))


def prune(txn: Writer, node: int, policy: CheckpointPolicy, *, newest: int = 0) -> tuple[int, int]:
    """Apply the policy to the path through a node: up to the root, and down as long as there is one way down.

    The checkpoint at `newest`, which has just been saved, stays wherever it is: somebody goes on from there.
    Best effort: where a record of the path is damaged, everything is kept. What the policy drops is space, not safety.

    Returns
    -------
    tuple of (int, int)
        References to blocks that were dropped, and pages that became free by it.
    """
    try:
        path = _path_through(txn, node)
    except IndexDamaged:
        return 0, 0
    found = [c for n in path for c in n.checkpoints if c.complete]
    bad = table.bad_blocks(txn)
    keep = {newest} | _kept(txn, path, [c.position for c in found], policy)
    if bad:  # nobody can be given those: they take no other's place
        keep |= _kept(txn, path, [c.position for c in found if bad.isdisjoint(c.ids)], policy)
    references = pages = 0
    for n in path:
        stale = [c for c in n.checkpoints if c.complete and c.position not in keep]
        if stale:
            references += sum(len(c.ids) for c in stale)
            pages += _drop(txn, stale)
            nodes.store(txn, n.replace(checkpoints=tuple(c for c in n.checkpoints if c not in stale)))
    return references, pages


def _kept(txn: Writer, path: list[Node], positions: list[int], policy: CheckpointPolicy) -> set[int]:
    """Which of a path's positions, ascending, are kept: for its own sake, and for those that leave it."""
    keep = policy.kept(positions)
    for place, n in enumerate(path):
        if nodes.count_children(txn, n.node, 2) > 1:
            before = [position for position in positions if position <= n.end]
            on_path = path[place + 1].node if place + 1 < len(path) else 0
            keep.update(before[-_kept_at_branch(txn, n.node, on_path, policy.per_path) :])
    return keep


def _kept_at_branch(txn: Writer, branch: int, on_path: int, per_path: int) -> int:
    """How many checkpoints at or before a branch its other paths need to have `per_path` each; at least one."""
    kept = 1
    for looked_at, child in enumerate(nodes.children_of(txn, branch)):
        if looked_at == _CHILDREN_LOOKED_AT:
            return per_path
        if child != on_path:
            kept = max(kept, per_path - _checkpoints_below(txn, child, per_path - kept))
    return kept


def _checkpoints_below(txn: Writer, node: int, enough: int) -> int:
    """How many complete checkpoints are at a node and along the single way down from it; not behind damage. Stops at `enough`."""
    found = 0
    while found < enough:
        try:
            found += sum(c.complete for c in nodes.load(txn, node).checkpoints)
        except IndexDamaged:
            break
        below = [child for _, child in zip(range(2), nodes.children_of(txn, node), strict=False)]
        if len(below) != 1:
            break
        node = below[0]
    return found


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


def _drop(txn: Writer, checkpoints: list[Checkpoint]) -> int:
    """Drop what checkpoints refer to; returns the pages that became free."""
    unfinished.forget(txn, checkpoints)
    return sum(table.drop_reference(txn, block) for checkpoint in checkpoints for block in checkpoint.ids)
