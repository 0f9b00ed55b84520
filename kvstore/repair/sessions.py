"""Which nodes of a damaged index still hang together, and in which order they are worth keeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.env.damaged import DamagedFile
from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.records.node import Node, child_key
from kvstore.repair.records import Edge, Records, Space

__all__ = ["Sessions", "Step"]

_NODES_HELD = 512  # the trunk that many sessions share is read once


@dataclass(frozen=True, slots=True)
class Step:
    """A node on the path of a session. The tokens are those of the path, as far as it was followed."""

    space: Space
    node: Node
    tokens: bytearray

    def prompt(self, stop: int) -> bytes:
        """The tokens from the session's beginning to a position of the node."""
        return bytes(self.tokens[: 4 * stop])

    def blocks(self) -> list[tuple[bytes, int]]:
        """Its blocks with the positions that each has to hold; the tail, if there is one, last."""
        size = self.space.layout.block_tokens
        wanted = [(self.node.blocks[i : i + ID_BYTES], size) for i in range(0, len(self.node.blocks), ID_BYTES)]
        if self.node.tail:
            wanted.append((self.node.tail, self.node.end % size))
        return wanted

    @property
    def first_block(self) -> int:
        """Index of the first of them."""
        return self.node.start // self.space.layout.block_tokens


@dataclass(slots=True)
class Sessions:
    """The nodes to which a whole path leads from the root of a namespace whose layout is known.

    Attributes
    ----------
    edges : dict of int to Edge
        Those nodes.
    leaves : list of int
        Those without children, the one used last first.
    lost : int
        Nodes that were read and hang on nothing.
    """

    file: DamagedFile
    records: Records
    edges: dict[int, Edge] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    lost: int = 0
    _held: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        records, taken = self.records, dict[bytes, int]()
        for edge in sorted(records.edges.values(), key=lambda e: (e.start, -e.node)):  # parents before their children
            key = child_key(edge.parent, edge.first)
            if self._hangs(edge) and self._led_to(edge, key) and taken.setdefault(key, edge.node) == edge.node:
                self.edges[edge.node] = edge
        parents = {edge.parent for edge in self.edges.values()}
        self.leaves = sorted((node for node in self.edges if node not in parents), key=lambda node: (-self.last_use(node), -node))
        self.lost = len(records.edges) - len(self.edges)

    def last_use(self, node: int) -> int:
        """When a node was last used; 0 where that is lost."""
        usage = self.records.usage.get(node)
        return 0 if usage is None else usage.last_use

    def space(self, edge: Edge) -> Space | None:
        """The namespace that a node belongs to, if its layout is known."""
        return self.records.spaces.get(self.records.roots.get(edge.root, b""))

    def _hangs(self, edge: Edge) -> bool:
        """Whether a node begins where what it hangs on ends."""
        if edge.parent == edge.root:
            return edge.start == 0 and self.space(edge) is not None
        above = self.edges.get(edge.parent)
        return above is not None and (above.end, above.root) == (edge.start, edge.root)

    def _led_to(self, edge: Edge, key: bytes) -> bool:
        """Whether nothing says that the parent's child under this token is another node, or that it has none."""
        named = self.records.children.get(key)
        if named is None:
            return not self.records.children_whole
        return named == edge.node or named not in self.records.edges

    def path(self, leaf: int) -> Iterator[Step]:
        """The nodes from the root to a leaf; ends where a record is not what it was or doesn't fit the layout."""
        line = [self.edges[leaf]]
        while line[-1].parent in self.edges:
            line.append(self.edges[line[-1].parent])
        tokens = bytearray()
        for edge in reversed(line):
            space = self.space(edge)
            try:
                node = self._load(edge)
            except IndexDamaged:
                return
            if space is None or not _covers(node, space):
                return
            tokens += node.tokens
            yield Step(space, node, tokens)

    def _load(self, edge: Edge) -> Node:
        node = self._held.pop(edge.node, None) or edge.load(self.file)
        self._held[edge.node] = node
        while len(self._held) > _NODES_HELD:
            del self._held[next(iter(self._held))]
        return node


def _covers(node: Node, space: Space) -> bool:
    """Whether a node names a block for each row of its span, and nothing that its layout has not."""
    size = space.layout.block_tokens
    blocks = node.end // size - node.start // size
    return len(node.blocks) == ID_BYTES * blocks and bool(node.tail) == bool(node.end % size)
