"""Repair in place: a store whose structure is sound, and in which blocks or records are damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore import blocks as table
from kvstore.check import Problem, Progress, verify_contents
from kvstore.env import Environment, Reader, Writer
from kvstore.errors import IndexDamaged, LayoutError
from kvstore.ids import ID_BYTES
from kvstore.layout import Layout
from kvstore.radix import cut_node, nodes, sweep
from kvstore.records.block import Ref
from kvstore.records.meta import NamespaceRecord
from kvstore.records.node import Node, node_key
from kvstore.scope import StoreScope

__all__ = ["NEEDS_LAYOUT", "Held", "Mended", "held", "mend"]

NEEDS_LAYOUT = ("namespace", "root")  # what is wrong with these can't be set right where it is
_NODES_A_TRANSACTION = 64


@dataclass(frozen=True, slots=True)
class Held:
    """What a store holds, in numbers. `ends` are its leaves with their positions: a session that is shortened has another end."""

    sessions: int
    nodes: int
    tokens: int
    blocks: int
    payload_bytes: int
    ends: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Mended:
    """What was wrong, what is still wrong, and what the store held before and after."""

    problems: list[Problem]
    left: list[Problem]
    before: Held
    after: Held


def mend(environment: Environment, *, lock_timeout: float, dry_run: bool, progress: Progress | None) -> Mended:
    """Read every byte; cut out of the index what is damaged, with what can't be reached past it. For exclusive use.

    A running store keeps what lies behind a damaged block, since a save that produces the block again heals it. Here
    everything is to verify in the end, and a block that nobody saves again would hold its space for ever.

    Where a namespace's own records are damaged nothing is done: without its layout all of its blocks would look wrong.
    """
    with environment.reading() as txn:
        problems = verify_contents(environment, txn, deep=True, progress=progress)
        before = held(txn)
    if not problems or dry_run or any(problem.where.startswith(NEEDS_LAYOUT) for problem in problems):
        return Mended(problems, problems, before, before)
    store = StoreScope(environment, lock_timeout)
    store.transact(sweep)
    store.transact(_free_stuck)
    bad = frozenset(problem.block_id for problem in problems if problem.block_id)
    with environment.reading() as txn:
        damaged = [node.node for node in _readable(txn) if _damaged(txn, node, bad)]
        sizes = _block_tokens(txn)
    for at in range(0, len(damaged), _NODES_A_TRANSACTION):
        some = damaged[at : at + _NODES_A_TRANSACTION]
        store.transact(lambda txn, some=some: _cut(txn, some, bad, sizes))  # type: ignore[misc]  # bound now, not later
    store.transact(sweep)
    with environment.reading() as txn:
        left = verify_contents(environment, txn, deep=True, progress=progress)
        return Mended(problems, left, before, held(txn))


def _readable(txn: Reader) -> Iterator[Node]:
    for key, raw in txn.items(txn.db.nodes):
        with contextlib.suppress(IndexDamaged):
            yield Node.decode(int.from_bytes(key, "big"), raw)


def _block_tokens(txn: Reader) -> dict[int, int]:
    """Positions in a block of each namespace, by its root; of those whose layout can be read."""
    sizes: dict[int, int] = {}
    for key, raw in txn.items(txn.db.namespaces):
        try:
            record = NamespaceRecord.decode(key, raw)
            sizes[record.root] = Layout.decode(record.layout).block_tokens
        except (IndexDamaged, LayoutError):
            continue
    return sizes


def _free_stuck(txn: Writer) -> None:
    """Try once more to free the blocks that could not be freed when they went: a disk that failed then may not fail now."""
    stuck = []
    for key, raw in txn.items(txn.db.refs):
        with contextlib.suppress(IndexDamaged):
            stuck += [key] if not Ref.decode(key, raw).count else []
    for block_id in stuck:
        table.set_count(txn, block_id, 0)


def _lost(txn: Reader | Writer, block_id: bytes, bad: frozenset[bytes]) -> bool:
    return block_id in bad or not table.counted(txn, block_id)


def _damaged(txn: Reader | Writer, node: Node, bad: frozenset[bytes]) -> bool:
    return any(_lost(txn, block_id, bad) for block_id in node.referenced())


def _cut(txn: Writer, damaged: list[int], bad: frozenset[bytes], sizes: dict[int, int]) -> None:
    """Cut nodes before their first damaged block, and drop their damaged checkpoints. Those that are gone already are passed."""
    for number in damaged:
        if txn.get(node_key(number), txn.db.nodes) is None:
            continue
        node = nodes.load(txn, number)
        size = sizes.get(node.root, 0)
        first = next((k for k, block_id in enumerate(_row_blocks(node)) if _lost(txn, block_id, bad)), None)
        if first is not None or not size:
            position = 0 if first is None else (node.start // size + first) * size if size else 0
            cut_node(txn, node, position, size or 1)
            continue
        stale = [c for c in node.checkpoints if any(_lost(txn, block_id, bad) for block_id in c.ids)]
        nodes.store(txn, node.replace(checkpoints=tuple(c for c in node.checkpoints if c not in stale)))
        for checkpoint in stale:
            for block_id in checkpoint.ids:
                table.drop_reference(txn, block_id)


def _row_blocks(node: Node) -> list[bytes]:
    joined = node.blocks + node.tail
    return [joined[i : i + ID_BYTES] for i in range(0, len(joined), ID_BYTES)]


def held(txn: Reader) -> Held:
    """Count what a store holds, passing over what can't be read."""
    tokens = 0
    parents: set[int] = set()
    found: dict[int, int] = {}
    for node in _readable(txn):
        parents.add(node.parent)
        found[node.node] = node.end
        tokens += node.end - node.start
    ends = frozenset((node, end) for node, end in found.items() if node not in parents)
    payload = 0
    for key, raw in txn.items(txn.db.refs):
        try:
            payload += Ref.decode(key, raw).payload_bytes
        except IndexDamaged:
            continue
    return Held(len(ends), len(found), tokens, txn.entries(txn.db.refs), payload, ends)
