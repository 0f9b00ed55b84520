"""Verification: does everything in a store agree with everything else, down to the bytes if asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore import blocks as table
from kvstore import ids
from kvstore.env import Environment, Reader
from kvstore.errors import BlockDamaged, IndexDamaged, LayoutError
from kvstore.ids import ID_BYTES
from kvstore.kernel import crc32c
from kvstore.layout import Layout
from kvstore.radix import unfinished
from kvstore.records.block import BlockHeader, Ref, header_bytes
from kvstore.records.constants import KIND_ROWS
from kvstore.records.meta import NamespaceRecord, RootRecord
from kvstore.records.node import Node, Usage, child_key, decode_child

__all__ = ["Problem", "Progress", "verify_contents"]

Progress = Callable[[str, int, int], None]
"""Called with what is being checked, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes
    ----------
    where : str
        The record or block.
    what : str
        What is wrong with it.
    block_id : bytes
        The block that has to be refused for it, if it is one.
    """

    where: str
    what: str
    block_id: bytes = b""


@dataclass(slots=True)
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    references: Counter[bytes] = field(default_factory=Counter)
    layouts: dict[bytes, Layout] = field(default_factory=dict)
    roots: dict[int, Layout | None] = field(default_factory=dict)
    incomplete: set[tuple[int, int, int]] = field(default_factory=set)

    def add(self, where: str, what: object, block_id: bytes = b"") -> None:
        self.problems.append(Problem(where, str(what), block_id))


def verify_contents(environment: Environment, txn: Reader, *, deep: bool, progress: Progress | None = None) -> list[Problem]:
    """Check every record of the index against every other, and the blocks' headers; with `deep` every byte of every block.

    Reads in one read transaction, so it may run while others save; it pins what is freed meanwhile.
    """
    found = _Findings()
    _namespaces(txn, found)
    nodes = _nodes(txn, found, progress)
    _children(txn, found, nodes)
    _coverage(found, nodes)
    _saves(txn, found)
    _blocks(environment, txn, found, deep=deep, progress=progress)
    return found.problems


def _namespaces(txn: Reader, found: _Findings) -> None:
    for key, raw in txn.items(txn.db.namespaces):
        try:
            record = NamespaceRecord.decode(key, raw)
            found.roots[record.root] = None
            layout = Layout.decode(record.layout)
        except (IndexDamaged, LayoutError) as error:
            found.add(f"namespace {key.hex()}", error)
            continue
        if ids.namespace_id(layout.fingerprint, record.salt) != key:
            found.add(f"namespace {key.hex()}", "its id is not that of its layout and salt")
        found.roots[record.root] = layout
        found.layouts[key] = layout
        stands_for = txn.get(record.root.to_bytes(8, "big"), txn.db.roots)
        try:
            if stands_for is None or RootRecord.decode(record.root, stands_for).namespace != key:
                found.add(f"namespace {key.hex()}", f"its root {record.root} does not stand for it")
        except IndexDamaged as error:
            found.add(f"root {record.root}", error)
    for key, _ in txn.items(txn.db.roots, keys_only=True):
        if int.from_bytes(key, "big") not in found.roots:
            found.add(f"root {int.from_bytes(key, 'big')}", "it stands for no namespace")


def _nodes(txn: Reader, found: _Findings, progress: Progress | None) -> dict[int, Node]:
    nodes: dict[int, Node] = {}
    total = txn.entries(txn.db.nodes)
    for count, (key, raw) in enumerate(txn.items(txn.db.nodes)):
        if progress is not None and not count % 256:
            progress("nodes", count, total)
        number = int.from_bytes(key, "big")
        try:
            node = Node.decode(number, raw)
        except IndexDamaged as error:
            found.add(f"node {number}", error)
            continue
        found.references.update(node.referenced())
        found.incomplete.update((c.save_id, number, c.position) for c in node.checkpoints if not c.complete)
        nodes[number] = node.replace(tokens=node.tokens[:4])
    for key, raw in txn.items(txn.db.usage):
        number = int.from_bytes(key, "big")
        try:
            Usage.decode(number, raw)
        except IndexDamaged as error:
            found.add(f"usage of node {number}", error)
        if number not in nodes:
            found.add(f"usage of node {number}", "there is no such node")
    return nodes


def _children(txn: Reader, found: _Findings, nodes: dict[int, Node]) -> None:
    reached: set[int] = set()
    for key, raw in txn.items(txn.db.children):
        try:
            child = decode_child(key, raw)
        except IndexDamaged as error:
            found.add(f"child under {key.hex()}", error)
            continue
        node = nodes.get(child)
        if node is None or child_key(node.parent, node.first) != key:
            found.add(f"child under {key.hex()}", f"node {child} is not the one that it leads to")
        elif child in reached:
            found.add(f"node {child}", "two records lead to it")
        reached.add(child)
    for number, node in nodes.items():
        if number not in reached:
            found.add(f"node {number}", "nothing leads to it")
        parent = nodes.get(node.parent)
        if node.parent != node.root and (parent is None or parent.end != node.start or parent.root != node.root):
            found.add(f"node {number}", f"its parent {node.parent} does not end where it starts, at {node.start}")
        if node.parent == node.root and (node.start != 0 or node.root not in found.roots):
            found.add(f"node {number}", "it is a first edge that does not start at 0, or of no namespace")


def _coverage(found: _Findings, nodes: dict[int, Node]) -> None:
    """A node and its ancestors hold every row below its end."""
    for number, node in nodes.items():
        layout = found.roots.get(node.root)
        if layout is None:
            continue
        size = layout.block_tokens
        blocks = node.end // size - node.start // size
        if len(node.blocks) != ID_BYTES * blocks or bool(node.tail) != bool(node.end % size):
            found.add(
                f"node {number}",
                f"[{node.start}, {node.end}) needs {blocks} blocks and {'a' if node.end % size else 'no'} tail, "
                f"it has {len(node.blocks) // ID_BYTES} and {'one' if node.tail else 'none'}",
            )


def _saves(txn: Reader, found: _Findings) -> None:
    """Each incomplete checkpoint is being written by a save that is noted, or was: who writes next looks whether it still is."""
    noted = set()
    for key, record in unfinished.noted(txn):
        if record is None:
            found.add(f"note of a save under {key.hex()}", "it is damaged")
        elif record.position:
            noted.add((record.save_id, record.node, record.position))
    for save_id, node, position in sorted(noted - found.incomplete):
        found.add(f"note of save {save_id}", f"node {node} holds no incomplete checkpoint of it at position {position}")
    for save_id, node, position in sorted(found.incomplete - noted):
        found.add(f"node {node}", f"no save is noted for its incomplete checkpoint at position {position}, of save {save_id}")


def _blocks(
    environment: Environment,
    txn: Reader,
    found: _Findings,
    *,
    deep: bool,
    progress: Progress | None,
) -> None:
    stored = {key for key, _ in txn.items(txn.db.blocks, keys_only=True)}
    counted: set[bytes] = set()
    total = txn.entries(txn.db.refs)
    for count, (key, raw) in enumerate(txn.items(txn.db.refs)):
        if progress is not None:
            progress("blocks", count, total)
        counted.add(key)
        where = f"block {key.hex()}"
        try:
            ref = Ref.decode(key, raw)
        except IndexDamaged as error:
            found.add(where, error, key)
            continue
        if ref.count != found.references[key]:
            found.add(where, f"{found.references[key]} records refer to it, its count is {ref.count}")
        if key not in stored:
            found.add(where, "it has a reference record and no bytes", key)
            continue
        if not ref.count and not found.references[key]:
            found.add(where, f"it is of no use any more and can't be freed: {ref.pages} pages are taken until a repair")
            continue
        _block(environment, found, where, key, ref, deep=deep)
    for key in stored - counted:
        found.add(f"block {key.hex()}", "it has bytes and no reference record", key)
    for key in found.references.keys() - counted:
        found.add(f"block {key.hex()}", "records refer to it and it is not stored", key)


def _block(environment: Environment, found: _Findings, where: str, key: bytes, ref: Ref, *, deep: bool) -> None:
    try:
        header = _any_header(environment, key, ref)
        layout = found.layouts.get(header.namespace)
        if layout is None:
            raise BlockDamaged("it belongs to no namespace of the store", block_id=key)
        rows = header.kind == KIND_ROWS
        if rows and header.payload_bytes != layout.payload_bytes(header.tokens):
            raise BlockDamaged("its length is not that of its rows", block_id=key)
        if deep:
            _bytes(environment, key, ref, header, layout)
    except (BlockDamaged, OSError) as error:
        found.add(where, error, key)


def _any_header(environment: Environment, key: bytes, ref: Ref) -> BlockHeader:
    """Read a header whose number of sums is not known: from the padded length that its offset leaves room for."""
    first = header_bytes(0)
    for padded in (first, *range(first + 4096, first + 16 * 4096, 4096)):
        try:
            header = BlockHeader.decode(environment.pread(padded, ref.offset - padded))
        except IndexDamaged:
            continue
        return table.read_header(environment, key, ref, len(header.sums))
    raise BlockDamaged(f"block {key.hex()}: there is no whole header in front of its payload", block_id=key)


def _bytes(environment: Environment, key: bytes, ref: Ref, header: BlockHeader, layout: Layout) -> None:
    payload = environment.pread(ref.payload_bytes, ref.offset)
    if len(payload) != ref.payload_bytes:
        raise BlockDamaged(f"only {len(payload)} of {ref.payload_bytes} bytes of its payload are in the file", block_id=key)
    domain = ids.block_domain(header.namespace)
    if header.kind == KIND_ROWS:
        offsets = layout.segments(header.tokens)
        parts = [payload[o : o + s.rows(header.tokens) * s.row_bytes] for o, s in zip(offsets, layout.streams, strict=False)]
    else:
        parts = [payload]
    if not np.array_equal(np.array([crc32c(part) for part in parts], np.uint32), header.sums):
        raise BlockDamaged("a checksum of its payload is wrong", block_id=key)
    if ids.block_id(domain, header.kind, header.tokens, memoryview(payload)) != key:
        raise BlockDamaged("its payload does not hash to its id", block_id=key)
