"""Saves that take several transactions: noted in the store, with who is at it.

The note keeps others from evicting the save's path. From its first states on it stands for the incomplete checkpoint: it is there
from the transaction that makes the checkpoint, moves with it where its node is split, and goes with it, in the transaction that
completes it, evicts it or gives it up. So what a dead saver leaves comes back by itself: whoever writes next needs to look at
nothing but the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvstore import blocks as table
from kvstore.env import Process, Reader, Writer
from kvstore.errors import IndexDamaged
from kvstore.radix import nodes
from kvstore.records.meta import SAVE_PREFIX, SaveRecord
from kvstore.records.node import Checkpoint, Node

__all__ = ["clear", "drop", "end", "forget", "held", "incomplete", "moved", "note", "noted"]

_BLOCKS_AT_ONCE = 256


def note(txn: Writer, save_id: int, node: int, position: int, process: Process) -> None:
    """Note that a process is writing the incomplete checkpoint of a save, or with position 0 its rows."""
    key = SaveRecord.key_of(save_id)
    raw = SaveRecord(save_id, node, position, process.pid, process.started, process.boot).encode()
    if txn.get(key, txn.db.meta) != raw:
        txn.put(txn.db.meta, key, raw)


def end(txn: Writer, save_id: int) -> None:
    """Take back the note of a save that has no incomplete checkpoint, if there is one."""
    txn.delete(txn.db.meta, SaveRecord.key_of(save_id))


def held(txn: Reader | Writer, runs: Callable[[SaveRecord], bool], since: int) -> set[int]:
    """The nodes at which saves are that have got on since then, so that nobody evicts them. Their ancestors have children."""
    records = [record for _, record in noted(txn) if record is not None]
    return {r.node for r in records if nodes.usage_of(txn, r.node).last_use >= since and runs(r)}


def moved(txn: Writer, node: Node) -> None:
    """Let the notes of a node's incomplete checkpoints name that node: a split has handed them to it."""
    for checkpoint in incomplete(node):
        record = _noted(txn, checkpoint.save_id)
        if record is None:
            txn.damage = True
        else:
            note(txn, record.save_id, node.node, record.position, Process(record.pid, record.started, record.boot))


def forget(txn: Writer, checkpoints: Iterable[Checkpoint]) -> None:
    """Take back the notes of incomplete checkpoints that are going, or become complete. Others have none."""
    for checkpoint in checkpoints:
        if not checkpoint.complete:
            txn.delete(txn.db.meta, SaveRecord.key_of(checkpoint.save_id))


def incomplete(node: Node) -> list[Checkpoint]:
    """The incomplete checkpoints of a node."""
    return [c for c in node.checkpoints if not c.complete]


def noted(txn: Reader | Writer) -> Iterator[tuple[bytes, SaveRecord | None]]:
    """Every note's key, and what it says; None for one that is damaged. Costs next to nothing when there are none."""
    for key, raw in txn.items(txn.db.meta, SAVE_PREFIX):
        if not key.startswith(SAVE_PREFIX):
            return
        try:
            yield key, SaveRecord.decode(key, raw)
        except IndexDamaged:
            yield key, None


def clear(txn: Writer, runs: Callable[[SaveRecord], bool]) -> bool:
    """Drop what saves have left of their states that nobody is at any more.

    Some at a time, as much as one transaction should free. Returns whether there was no more.

    Parameters
    ----------
    runs : callable
        Whether the save of a record is still under way.
    """
    dropped = 0
    for key, record in list(noted(txn)):
        if record is None:
            txn.damage = True
            txn.delete(txn.db.meta, key)
        elif not runs(record):
            if dropped >= _BLOCKS_AT_ONCE:
                return False
            dropped += drop(txn, record)
    return True


def drop(txn: Writer, record: SaveRecord) -> int:
    """Drop the incomplete checkpoint of a save and its note; returns how many blocks it had."""
    txn.delete(txn.db.meta, SaveRecord.key_of(record.save_id))
    if not record.position:
        return 0  # its rows are a longer stored prefix
    try:
        node = nodes.load(txn, record.node)
    except IndexDamaged:
        txn.damage = True  # what is left of it is swept
        return 0
    stale = [c for c in incomplete(node) if (c.save_id, c.position) == (record.save_id, record.position)]
    if not stale:
        txn.damage = True  # a note goes with its checkpoint
        return 0
    for block in stale[0].ids:
        table.drop_reference(txn, block)
    nodes.store(txn, node.replace(checkpoints=tuple(c for c in node.checkpoints if c not in stale)))
    return len(stale[0].ids)


def _noted(txn: Reader | Writer, save_id: int) -> SaveRecord | None:
    key = SaveRecord.key_of(save_id)
    raw = txn.get(key, txn.db.meta)
    try:
        return None if raw is None else SaveRecord.decode(key, raw)
    except IndexDamaged:
        return None
