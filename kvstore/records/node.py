"""Records of the radix index: nodes (edges), the children that lead to them, and when they were last used.

Budget: a node costs 56 bytes, 4 for each token, 32 for each block and for a tail, 24 and 32 for each block of a checkpoint;
a child's pointer 28 bytes, a usage record 28 bytes. At 128 tokens a block, 100,000 tokens cost some 430 kB of index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.records.frame import FRAME_BYTES, frame, unframe

__all__ = [
    "CHECKPOINT_BYTES",
    "Checkpoint",
    "Node",
    "Usage",
    "child_key",
    "decode_child",
    "encode_child",
    "node_key",
    "node_record_bytes",
]

# record types; on disk
_NODE, _CHILD, _USAGE = 4, 5, 6

# on disk: parent, root, first token, start, end, blocks, 1 if there is a tail, checkpoints
_NODE_BODY = struct.Struct("<QQIIIIII")
# on disk: position, 1 if complete, save id, bytes of the packed states, blocks
_CHECKPOINT_BODY = struct.Struct("<IIQQI4x")
_CHILD_BODY = struct.Struct("<Q")
_USAGE_BODY = struct.Struct("<QI4x")
_NODE_KEY = struct.Struct(">Q")
_CHILD_KEY = struct.Struct(">QI")

CHECKPOINT_BYTES: Final = _CHECKPOINT_BODY.size


def node_key(node: int) -> bytes:
    """Key of `nodes` and `usage`: the node's id, big-endian so that keys sort by it."""
    return _NODE_KEY.pack(node)


def child_key(parent: int, first: int) -> bytes:
    """Key of `children`: the parent's id and the first token of the child's edge, big-endian."""
    return _CHILD_KEY.pack(parent, first)


def encode_child(key: bytes, node: int) -> bytes:
    """Encode the value of `children` under `key`."""
    return frame(_CHILD, key, _CHILD_BODY.pack(node))


def decode_child(key: bytes, raw: bytes) -> int:
    """Decode the node id of a child; raises IndexDamaged."""
    start = unframe(_CHILD, key, raw)
    if len(raw) != start + _CHILD_BODY.size:
        raise IndexDamaged(f"the child record under {key.hex()} has {len(raw)} bytes")
    return int(_CHILD_BODY.unpack_from(raw, start)[0])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All states of the layout at one exact position.

    Attributes
    ----------
    position : int
        The number of tokens that the states have consumed.
    save_id : int
        Which save wrote it; tells the pieces of two saves at one position apart.
    complete : bool
        False while pieces are still being written. An incomplete checkpoint is never matched.
    packed_bytes : int
        Length of the packed states (kvstore.records.states).
    blocks : bytes
        Ids of the blocks that hold them, in order, 32 bytes each.
    """

    position: int
    save_id: int
    complete: bool
    packed_bytes: int
    blocks: bytes

    @property
    def ids(self) -> list[bytes]:
        """The block ids one by one."""
        return split_ids(self.blocks)


def split_ids(joined: bytes) -> list[bytes]:
    """Cut joined block ids apart."""
    return [joined[i : i + ID_BYTES] for i in range(0, len(joined), ID_BYTES)]


@dataclass(frozen=True, slots=True)
class Node:
    """An edge of the radix tree: positions [start, end) of a prefix, and what is stored for them.

    Attributes
    ----------
    node, parent, root : int
        Ids: its own, its parent's (the namespace's root for a first edge), its namespace's root.
    start, end : int
        The positions of the edge.
    tokens : bytes
        Tokens of those positions, uint32 little-endian.
    blocks : bytes
        Joined ids of the blocks that end inside (start, end], in order. The first may start before `start`.
    tail : bytes
        Id of the block that holds the rows from the last block boundary to `end`, or empty when `end` is a boundary.
        That block may hold more rows than that, after a split.
    checkpoints : tuple of Checkpoint
        Sorted by position, each in (start, end].
    """

    node: int
    parent: int
    root: int
    start: int
    end: int
    tokens: bytes
    blocks: bytes = b""
    tail: bytes = b""
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def first(self) -> int:
        """The first token of the edge, under which the parent finds it."""
        return int.from_bytes(self.tokens[:4], "little")

    def replace(self, **changes: object) -> Node:
        """A copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace is typed field by field

    def referenced(self) -> list[bytes]:
        """Ids of all blocks that this node holds a counted reference to, one for each reference."""
        ids = split_ids(self.blocks)
        if self.tail:
            ids.append(self.tail)
        for checkpoint in self.checkpoints:
            ids.extend(checkpoint.ids)
        return ids

    def encode(self) -> bytes:
        """Encode as the value of `nodes` under `node_key(node)`."""
        parts = [
            _NODE_BODY.pack(
                self.parent,
                self.root,
                self.first,
                self.start,
                self.end,
                len(self.blocks) // ID_BYTES,
                1 if self.tail else 0,
                len(self.checkpoints),
            ),
            self.tokens,
            self.blocks,
            self.tail,
        ]
        for c in self.checkpoints:
            head = _CHECKPOINT_BODY.pack(c.position, int(c.complete), c.save_id, c.packed_bytes, len(c.blocks) // ID_BYTES)
            parts += [head, c.blocks]
        return frame(_NODE, node_key(self.node), b"".join(parts))

    @classmethod
    def decode(cls, node: int, raw: bytes) -> Node:
        """Decode; raises IndexDamaged. Every length is checked against the record's own before it is used."""
        at = unframe(_NODE, node_key(node), raw)
        if len(raw) < at + _NODE_BODY.size:
            raise IndexDamaged(f"the record of node {node} is too short")
        parent, root, first, start, end, blocks, tail, checkpoints = _NODE_BODY.unpack_from(raw, at)
        at += _NODE_BODY.size
        ends = at + 4 * (end - start), at + 4 * (end - start) + ID_BYTES * blocks
        after = ends[1] + ID_BYTES * tail
        if not start < end or tail > 1 or after > len(raw):
            raise IndexDamaged(f"the record of node {node} does not parse: [{start}, {end}), {blocks} blocks, {len(raw)} bytes")
        tokens = raw[at : ends[0]]
        if int.from_bytes(tokens[:4], "little") != first:
            raise IndexDamaged(f"the record of node {node} names another first token than its edge has")
        found = _decode_checkpoints(node, raw, after, checkpoints, start, end) if checkpoints or after != len(raw) else ()
        return cls(node, parent, root, start, end, tokens, raw[ends[0] : ends[1]], raw[ends[1] : after], found)


def _decode_checkpoints(node: int, raw: bytes, at: int, count: int, start: int, end: int) -> tuple[Checkpoint, ...]:
    checkpoints: list[Checkpoint] = []
    for _ in range(count):
        if len(raw) < at + CHECKPOINT_BYTES:
            raise IndexDamaged(f"the record of node {node} ends inside a checkpoint")
        position, complete, save_id, packed_bytes, blocks = _CHECKPOINT_BODY.unpack_from(raw, at)
        at += CHECKPOINT_BYTES
        ids = raw[at : at + ID_BYTES * blocks]
        at += ID_BYTES * blocks
        if len(ids) != ID_BYTES * blocks or complete > 1 or not start < position <= end:
            raise IndexDamaged(f"the record of node {node} holds a checkpoint that does not parse, at position {position}")
        checkpoints.append(Checkpoint(position, save_id, bool(complete), packed_bytes, ids))
    if at != len(raw):
        raise IndexDamaged(f"the record of node {node} has {len(raw) - at} bytes too many")
    return tuple(checkpoints)


def node_record_bytes(tokens: int, blocks: int, checkpoint_blocks: tuple[int, ...] = ()) -> int:
    """Bytes of the record of a node with a tail, this many tokens and blocks, and checkpoints of this many blocks each."""
    fixed = FRAME_BYTES + _NODE_KEY.size + _NODE_BODY.size + ID_BYTES
    return fixed + 4 * tokens + ID_BYTES * blocks + sum(CHECKPOINT_BYTES + ID_BYTES * n for n in checkpoint_blocks)


@dataclass(frozen=True, slots=True)
class Usage:
    """When a node was last used, and how often. A record of its own, so that a touch rewrites little.

    `last_use` is in microseconds since the epoch.
    """

    last_use: int
    count: int

    def encode(self, node: int) -> bytes:
        """Encode as the value of `usage` under `node_key(node)`."""
        return frame(_USAGE, node_key(node), _USAGE_BODY.pack(self.last_use, min(self.count, 0xFFFFFFFF)))

    @classmethod
    def decode(cls, node: int, raw: bytes) -> Usage:
        """Decode; raises IndexDamaged."""
        start = unframe(_USAGE, node_key(node), raw)
        if len(raw) != start + _USAGE_BODY.size:
            raise IndexDamaged(f"the usage record of node {node} has {len(raw)} bytes")
        return cls(*_USAGE_BODY.unpack_from(raw, start))
