"""Growing the index: extending a leaf in place, chaining nodes, splitting an edge at the exact token where prompts part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore import blocks as table
from kvstore.blocks import PreparedBlock
from kvstore.env import Writer
from kvstore.errors import BaseLost, IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.radix import nodes, unfinished
from kvstore.radix.walk import Path, walk
from kvstore.records.constants import inline_limit
from kvstore.records.node import Node, node_key, node_record_bytes, split_ids

__all__ = ["Grown", "NodeLimit", "grow"]


@dataclass(frozen=True, slots=True)
class NodeLimit:
    """How long an edge may become: as long as keeps its record inside a leaf page.

    Attributes
    ----------
    block_tokens : int
        Positions in a block.
    record_bytes : int
        The longest record of a node, without its checkpoints.
    """

    block_tokens: int
    record_bytes: int

    @classmethod
    def of(cls, page_bytes: int, block_tokens: int, checkpoint_blocks: int) -> NodeLimit:
        """The limit in files of this page size; checkpoints of this many blocks each are left room for."""
        most = inline_limit(page_bytes, len(node_key(0)))
        reserved = node_record_bytes(0, 0, (checkpoint_blocks,) * 3) - node_record_bytes(0, 0) if checkpoint_blocks else 0
        return cls(block_tokens, most - min(reserved, most // 2))

    def end(self, node_start: int, node_end: int, upto: int) -> int:
        """How far a node that starts at `node_start` may reach: `upto` itself, else the last block boundary that fits.

        Returns `node_end` when there is no boundary behind it that fits.
        """
        size = self.block_tokens
        if self._fits(node_start, upto):
            return upto
        per_block = 4 * size + ID_BYTES
        room = self.record_bytes - node_record_bytes(0, 0)
        boundary = (node_start // size + room // per_block) * size
        while boundary > node_end and not self._fits(node_start, boundary):
            boundary -= size
        if boundary <= node_end and node_end // size == node_start // size:
            boundary = (node_end // size + 1) * size  # a block of many tokens: its edge takes overflow pages instead
        return max(min(boundary, upto), node_end)

    def _fits(self, start: int, end: int) -> bool:
        blocks = end // self.block_tokens - start // self.block_tokens
        return node_record_bytes(end - start, blocks) <= self.record_bytes


@dataclass(slots=True)
class Grown:
    """What a transaction added to the index."""

    leaf: int = 0
    new_tokens: int = 0
    new_blocks: int = 0
    written_bytes: int = 0
    healed_blocks: int = 0
    path: set[int] = field(default_factory=set)


def grow(
    txn: Writer,
    root: int,
    prompt: bytes,
    prepared: Mapping[int, PreparedBlock],
    limit: NodeLimit,
    bad: frozenset[bytes],
) -> Grown:
    """Make the index hold all of `prompt`, from what is stored and the blocks prepared.

    What is stored already is skipped, a longer stored session is success, nothing is ever truncated.

    Parameters
    ----------
    prompt : bytes
        Tokens as uint32 little-endian, up to the end of what is to be held.
    prepared : mapping of int to PreparedBlock
        By block index, consecutive up to the end of the prompt; the last may be a tail.
    bad : frozenset of bytes
        Blocks that failed their checks: where a prepared block stands for one of them, it takes its place.

    Raises
    ------
    BaseLost
        When what is stored ends before the first prepared block.
    """
    size, upto = limit.block_tokens, len(prompt) // 4
    path = walk(txn, root, prompt)
    grown = Grown()
    if bad:
        _heal(txn, path, prepared, size, bad, grown)
    at = path.matched
    if at < upto:
        if at // size not in prepared:
            raise BaseLost(f"the stored prefix of {at} tokens does not reach the first block of the save; save from further back")
        _append(txn, path, prompt, prepared, limit, bad, grown)
    elif path.inside and _lost(txn, path, at, size, bad) and at // size in prepared:
        # the prompt ends inside a block that can't be read: its own rows become the tail of a part that ends with it
        path.nodes[-1] = _split(txn, path, prepared, size, bad, grown)
    grown.path.update(node.node for node in path.nodes)
    grown.leaf = grown.leaf or path.nodes[-1].node
    grown.path.add(grown.leaf)
    grown.new_tokens = upto - at
    return grown


def _append(
    txn: Writer,
    path: Path,
    prompt: bytes,
    prepared: Mapping[int, PreparedBlock],
    limit: NodeLimit,
    bad: frozenset[bytes],
    grown: Grown,
) -> None:
    upto, at = len(prompt) // 4, path.matched
    parent = path.root
    if path.nodes:
        last = path.nodes[-1]
        if path.inside:
            last = path.nodes[-1] = _split(txn, path, prepared, limit.block_tokens, bad, grown)
        elif not nodes.has_children(txn, last.node):
            end = limit.end(last.start, last.end, upto)
            if end > last.end:
                last = path.nodes[-1] = _extend(txn, last, prompt, end, prepared, limit.block_tokens, grown)
                at = end
        parent = last.node
        grown.leaf = parent
    while at < upto:
        node = nodes.new_node_id(txn)
        end = limit.end(at, at, upto)
        record = Node(node, parent, path.root, at, at, b"")
        record = _extend(txn, record, prompt, end, prepared, limit.block_tokens, grown)
        nodes.link(txn, parent, record.first, node)
        nodes.touch(txn, node, nodes.now())
        grown.path.add(node)
        grown.leaf = parent = node
        at = end


def _extend(
    txn: Writer, node: Node, prompt: bytes, end: int, prepared: Mapping[int, PreparedBlock], size: int, grown: Grown
) -> Node:
    """Let a node without children reach `end`: put the blocks that end there, replace its tail."""
    indices = range(node.end // size, end // size)
    ids = [_put(txn, prepared, index, grown) for index in indices]
    tail = _put(txn, prepared, end // size, grown) if end % size else b""
    if node.tail:
        table.drop_reference(txn, node.tail)
    longer = node.replace(
        end=end, tokens=node.tokens + prompt[4 * node.end : 4 * end], blocks=node.blocks + b"".join(ids), tail=tail
    )
    nodes.store(txn, longer)
    return longer


def _put(txn: Writer, prepared: Mapping[int, PreparedBlock], index: int, grown: Grown) -> bytes:
    block = prepared[index]
    written = table.put(txn, block)
    grown.written_bytes += written
    grown.new_blocks += written > 0
    return block.block_id


def _lost(txn: Writer, path: Path, at: int, size: int, bad: frozenset[bytes]) -> bool:
    """Whether the rows between the last block boundary and `at` lie in a block that can't be read."""
    if not at % size:
        return False
    stored = path.partial_block(at, size)
    return stored in bad or not table.counted(txn, stored)


def _split(txn: Writer, path: Path, prepared: Mapping[int, PreparedBlock], size: int, bad: frozenset[bytes], grown: Grown) -> Node:
    """Split the edge in which a path ends; return the upper part, which has a new id.

    The lower part keeps its id and so its children. When the path ends inside a block, the upper part takes a counted
    reference to it as its tail: its rows up to there are valid for both. Where that block can't be read, the prepared one,
    which holds the same rows, is its tail instead.
    """
    node, at = path.nodes[-1], path.matched
    if not node.start < at < node.end:
        raise IndexDamaged(f"cannot split node {node.node} of [{node.start}, {node.end}) at {at}")
    cut, whole = 4 * (at - node.start), at // size - node.start // size
    tail = b""
    if at % size and _lost(txn, path, at, size, bad):
        tail = _put(txn, prepared, at // size, grown)
    elif at % size:
        tail = path.partial_block(at, size)
        table.take_reference(txn, tail)
    upper = Node(
        nodes.new_node_id(txn),
        node.parent,
        node.root,
        node.start,
        at,
        node.tokens[:cut],
        node.blocks[: ID_BYTES * whole],
        tail,
        tuple(c for c in node.checkpoints if c.position <= at),
    )
    lower = node.replace(
        parent=upper.node,
        start=at,
        tokens=node.tokens[cut:],
        blocks=node.blocks[ID_BYTES * whole :],
        checkpoints=tuple(c for c in node.checkpoints if c.position > at),
    )
    nodes.store(txn, upper)
    nodes.store(txn, lower)
    unfinished.moved(txn, upper)
    nodes.link(txn, node.parent, upper.first, upper.node)
    nodes.link(txn, upper.node, lower.first, lower.node)
    txn.put(txn.db.usage, node_key(upper.node), nodes.usage_of(txn, node.node).encode(upper.node))
    return upper


def _heal(txn: Writer, path: Path, prepared: Mapping[int, PreparedBlock], size: int, bad: frozenset[bytes], grown: Grown) -> None:
    """Let prepared blocks take the places of bad ones on the path: under the same id anew, under another one instead.

    Only where the prompt has the block's tokens to its end; the block in which a path ends inside an edge is `_split`'s.
    """
    for place, node in enumerate(path.nodes):
        first = node.start // size
        ids, tail = split_ids(node.blocks), node.tail
        for index, block in prepared.items():
            k = index - first
            if 0 <= k < len(ids) and ids[k] in bad and (index + 1) * size <= path.matched:
                ids[k] = _swap(txn, ids[k], block, grown)
            elif k == len(ids) and tail in bad and node.end <= path.matched and index * size + block.header.tokens >= node.end:
                tail = _swap(txn, tail, block, grown)
        changed = node.replace(blocks=b"".join(ids), tail=tail)
        if changed != node:
            nodes.store(txn, changed)
            path.nodes[place] = changed


def _swap(txn: Writer, old: bytes, block: PreparedBlock, grown: Grown) -> bytes:
    lost = not table.counted(txn, old)
    txn.damage = txn.damage or lost
    grown.written_bytes += table.put(txn, block)
    if not (lost and block.block_id == old):  # a block whose count was lost starts with this one reference
        table.drop_reference(txn, old)
    grown.healed_blocks += 1
    return block.block_id
