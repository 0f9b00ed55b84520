"""Walking the index: the longest stored prefix of a prompt, token by token, and the blocks that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.env import Reader, Writer
from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES, common_tokens
from kvstore.radix.nodes import child_of, load
from kvstore.records.node import Checkpoint, Node, child_key

__all__ = ["Path", "cut_damage", "walk"]


@dataclass(slots=True)
class Path:
    """What a walk found.

    Attributes
    ----------
    root : int
        The namespace's root.
    nodes : list of Node
        From the root's child down. All but the last are matched whole.
    matched : int
        How many leading tokens of the prompt the path holds; at most the end of the last node.
    damage : IndexDamaged or None
        Why a tolerant walk ended where it did, if a record did not pass its checks.
    """

    root: int
    nodes: list[Node] = field(default_factory=list)
    matched: int = 0
    damage: IndexDamaged | None = None

    @property
    def inside(self) -> bool:
        """Whether the path ends inside the last node's edge instead of at its end."""
        return bool(self.nodes) and self.matched < self.nodes[-1].end

    def block_ids(self, block_tokens: int) -> bytes:
        """Joined ids of all whole blocks up to the end of the last node: the k-th holds positions from k * block_tokens."""
        return b"".join([node.blocks for node in self.nodes])

    def node_at(self, position: int) -> Node:
        """The node whose edge holds the row before `position`, that is start < position <= end."""
        for node in reversed(self.nodes):
            if node.start < position <= node.end:
                return node
        raise IndexDamaged(f"no node of the path holds position {position}; verify the store")

    def partial_block(self, position: int, block_tokens: int) -> bytes:
        """Id of a block that holds the rows from the last block boundary to `position`, which must not be a boundary.

        It may hold more rows. Nothing is borrowed from a descendant: a node and its ancestors hold every row below its end.
        """
        node = self.node_at(position)
        index = position // block_tokens - node.start // block_tokens
        found = node.blocks[ID_BYTES * index : ID_BYTES * (index + 1)] or node.tail
        if not found:
            raise IndexDamaged(f"node {node.node} holds no block for position {position}; verify the store")
        return found

    def sound(self, position: int, block_tokens: int, bad: frozenset[bytes]) -> int:
        """How far up to `position` the path can be read without a block in `bad`."""
        if not bad or not position:
            return position
        joined = self.block_ids(block_tokens)
        for index in range(position // block_tokens):
            if joined[ID_BYTES * index : ID_BYTES * (index + 1)] in bad:
                return index * block_tokens
        if position % block_tokens and self.partial_block(position, block_tokens) in bad:
            return position - position % block_tokens
        return position

    def checkpoints(self) -> list[tuple[Node, Checkpoint]]:
        """Complete checkpoints on the path at or before `matched`, in order of position."""
        return [(n, c) for n in self.nodes for c in n.checkpoints if c.complete and c.position <= self.matched]


def walk(txn: Reader | Writer, root: int, prompt: bytes, *, tolerant: bool = False) -> Path:
    """Follow a prompt from the root as far as it is stored.

    Parameters
    ----------
    prompt : bytes
        The tokens as uint32 little-endian. They are compared, not hashed.
    tolerant : bool
        End the path where a record does not pass its checks, instead of raising: what comes before it is whole.

    Raises
    ------
    IndexDamaged
        When a record does not pass its checks, unless `tolerant`.
    """
    path = Path(root)
    try:
        _follow(txn, path, prompt)
    except IndexDamaged as error:
        if not tolerant:
            raise
        path.damage = error
    return path


def cut_damage(txn: Writer, path: Path, prompt: bytes) -> None:
    """Unlink the record at which a tolerant walk ended, so that the prompt can be saved anew from there.

    What lay below it is never reached again; the sweep that this makes owed removes it.
    """
    parent = path.nodes[-1].node if path.nodes else path.root
    at = path.matched
    txn.damage = True
    txn.delete(txn.db.children, child_key(parent, int.from_bytes(prompt[4 * at : 4 * at + 4], "little")))
    path.damage = None


def _follow(txn: Reader | Writer, path: Path, prompt: bytes) -> None:
    parent, total = path.root, len(prompt) // 4
    while path.matched < total:
        at = path.matched
        child = child_of(txn, parent, int.from_bytes(prompt[4 * at : 4 * at + 4], "little"))
        if child is None:
            return
        node = load(txn, child)
        if node.start != at or node.parent != parent or node.root != path.root:
            raise IndexDamaged(
                f"node {child} is reached at position {at} below node {parent}, its record says position {node.start} "
                f"below node {node.parent}; verify the store"
            )
        path.nodes.append(node)
        if not prompt.startswith(node.tokens, 4 * at):
            path.matched = at + common_tokens(prompt[4 * at : 4 * node.end], node.tokens)
            return
        path.matched = node.end
        parent = child
