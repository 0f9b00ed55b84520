"""The records of a damaged store's index: those of one snapshot, each checked, none of which was taken from anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore import ids
from kvstore.env.damaged import LEAF_PAGE, DamagedFile, Entry, Meta, PageReader, Tree, free_pages, parse_leaf, walk_tree
from kvstore.errors import FormatVersionError, IndexDamaged, LayoutError
from kvstore.ids import ID_BYTES
from kvstore.layout import Layout
from kvstore.records.constants import PAGE_HEADER
from kvstore.records.meta import FORMAT_KEY, STORE_KEY, NamespaceRecord, RootRecord, StoreRecord, decode_format
from kvstore.records.node import Node, Usage, decode_child
from kvstore.repair.scan import Found, Place

__all__ = ["Edge", "Records", "Space", "read_records"]

_LONGEST = 4 << 20  # no record is as long
_TYPE_AT = 4  # in a record's envelope
_STORE, _NAMESPACE, _NODE, _CHILD, _USAGE, _ROOT = 1, 3, 4, 5, 6, 9


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace of the damaged store: its id, the digest of its salt, its layout, the key that its blocks are hashed with."""

    namespace: bytes
    salt: bytes
    layout: Layout
    domain: bytes

    @classmethod
    def of(cls, layout: Layout, salt: bytes) -> Space:
        """The namespace of a layout and a salt."""
        digest = ids.salt_digest(salt)
        namespace = ids.namespace_id(layout.fingerprint, digest)
        return cls(namespace, digest, layout, ids.block_domain(namespace))


@dataclass(frozen=True, slots=True)
class Edge:
    """A node, without its tokens and blocks: those are read again when they are needed.

    `at` and `length` say where its record lies in the file.
    """

    node: int
    parent: int
    root: int
    first: int
    start: int
    end: int
    at: int
    length: int

    def load(self, file: DamagedFile) -> Node:
        """Read the whole record. Raises IndexDamaged when the file gives something else by now."""
        node = Node.decode(self.node, file.read(self.at, self.length))
        if (node.parent, node.root, node.first, node.start, node.end) != (self.parent, self.root, self.first, self.start, self.end):
            raise IndexDamaged(f"node {self.node} is not what it was a moment ago")
        return node


@dataclass(slots=True)
class Records:
    """What could be read of the index.

    Attributes
    ----------
    store : StoreRecord or None
        The store's identity.
    old_stores : list of StoreRecord
        What it once was, from pages that are free by now.
    is_store : bool
        Whether anything was found that only a kvstore has.
    spaces : dict of bytes to Space
        Namespaces whose layout is known. Its id proves a namespace's layout and salt, so they may come from anywhere.
    roots : dict of int to bytes
        Which namespace a root stands for.
    edges : dict of int to Edge
        The snapshot's nodes.
    usage : dict of int to Usage
    children : dict of (int, bytes) to int
        The node below a parent under a key.
    children_whole : bool
        Whether that is all of them.
    foreign_version : FormatVersionError or None
        What a format record of another version says.
    unreadable_nodes : int
        Nodes that were there and did not pass their checks.
    whole : bool
        Whether every tree of the index is all that it is recorded to be.
    """

    store: StoreRecord | None = None
    old_stores: list[StoreRecord] = field(default_factory=list)
    is_store: bool = False
    spaces: dict[bytes, Space] = field(default_factory=dict)
    roots: dict[int, bytes] = field(default_factory=dict)
    edges: dict[int, Edge] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    children: dict[bytes, int] = field(default_factory=dict)
    children_whole: bool = False
    foreign_version: FormatVersionError | None = None
    unreadable_nodes: int = 0
    whole: bool = False

    def take(self, key: bytes, raw: bytes, at: int) -> None:
        """Take in a record of the snapshot, if it is one and none of its key is known. Raises IndexDamaged if it is none."""
        kind = raw[_TYPE_AT] if len(raw) > _TYPE_AT else 0
        number = int.from_bytes(key[:8], "big")
        if kind == _NODE and len(key) == 8:
            node = Node.decode(number, raw)
            edge = Edge(number, node.parent, node.root, node.first, node.start, node.end, at, len(raw))
            self.edges.setdefault(number, edge)
        elif kind == _USAGE and len(key) == 8:
            self.usage.setdefault(number, Usage.decode(number, raw))
        elif kind == _CHILD and len(key) == 12:
            self.children.setdefault(key, decode_child(key, raw))
        elif kind == _ROOT and len(key) == 8:
            self.roots.setdefault(number, RootRecord.decode(number, raw).namespace)
        elif kind == _NAMESPACE and len(key) == ID_BYTES:
            record = NamespaceRecord.decode(key, raw)
            self.roots.setdefault(record.root, key)
            self.take_space(record)
        elif kind == _STORE and key == STORE_KEY:
            record_of_store = StoreRecord.decode(raw)
            self.store = self.store or record_of_store
        else:
            raise IndexDamaged("no record of the index")
        self.is_store = True

    def take_space(self, record: NamespaceRecord) -> None:
        """Take in what a namespace is, if its id is that of its layout and salt."""
        with contextlib.suppress(LayoutError):
            layout = Layout.decode(record.layout)
            if ids.namespace_id(layout.fingerprint, record.salt) == record.namespace:
                self.is_store = True
                self.spaces.setdefault(
                    record.namespace, Space(record.namespace, record.salt, layout, ids.block_domain(record.namespace))
                )


_WALKED = (b"meta", b"namespaces", b"roots", b"nodes", b"children", b"usage")


def read_records(file: DamagedFile, meta: Meta | None, found: Found, known: Iterable[Space], *, rebuilt: bool) -> Records:
    """Read the index of the snapshot that a meta page names; without one, only what proves itself.

    Parameters
    ----------
    known : iterable of Space
        Namespaces that are known from elsewhere.
    rebuilt : bool
        Whether the meta page was not found but guessed: then only what its trees lead to counts.
    """
    records = Records(is_store=bool(found.blocks), spaces={space.namespace: space for space in known})
    if meta is not None:
        pages = PageReader(file, meta.page_bytes, meta.last_page)
        pages.free = free_pages(pages, meta.free)
        missing = _walk(pages, meta, records)
        records.whole = not missing
        if missing and pages.free is not None and not rebuilt:
            _strays(pages, records, found, missing)
    for size, leaves in found.leaves.items():
        _self_proving(file, size, leaves.tolist(), records)
    return records


def _walk(pages: PageReader, meta: Meta, records: Records) -> dict[bytes, int]:
    """Read the trees; returns those that aren't whole with how many entries they lack, negative where that isn't known."""

    def visit(name: bytes, entry: Entry) -> None:
        if entry.key == FORMAT_KEY:
            _format(records, entry.value)
            return
        raw = pages.value(entry, _LONGEST)
        try:
            records.take(entry.key, raw, entry.at)
        except IndexDamaged:
            records.unreadable_nodes += name == b"nodes"

    trees: dict[bytes, Tree] = {}
    databases: list[Entry] = []
    walk_tree(pages, meta.main, databases.append)
    for entry in databases:
        if entry.tree is not None:
            trees[entry.key] = entry.tree
    missing: dict[bytes, int] = {}
    for name in _WALKED:
        tree = trees.get(name)
        walk = None if tree is None else walk_tree(pages, tree, partial(visit, name))
        if tree is None or walk is None:
            missing[name] = -1
        elif not walk.whole:
            missing[name] = tree.entries - walk.entries
        records.children_whole |= name == b"children" and name not in missing
    return missing


def _format(records: Records, raw: bytes) -> None:
    try:
        decode_format(raw)
    except FormatVersionError as error:
        records.foreign_version = error
    except IndexDamaged:
        pass  # the store's identity says as much
    else:
        records.is_store = True


_TYPES = {b"namespaces": _NAMESPACE, b"roots": _ROOT, b"nodes": _NODE, b"children": _CHILD, b"usage": _USAGE, b"meta": _STORE}


def _strays(pages: PageReader, records: Records, found: Found, missing: dict[bytes, int]) -> None:
    """Read the leaf pages that no tree leads to any more, though the snapshot has them: they are neither free nor a block's.

    A tree that is whole lacks nothing, and none takes in more entries than it has lost: where more are found, the meta page
    doesn't tell the truth about where the snapshot ends.
    """
    wanted = {_TYPES[name]: count for name, count in missing.items()}
    held: dict[int, list[tuple[bytes, bytes, int]]] = {kind: [] for kind in wanted}
    taken = _covered(pages, (place for places in found.blocks.values() for place in places))
    for page in found.leaves[pages.page_bytes].tolist():
        pages.reached.clear()
        raw = pages.page(page, LEAF_PAGE) if page not in taken else None
        for entry in parse_leaf(raw, page)[0] if raw is not None else ():
            value = pages.value(entry, _LONGEST)
            kind = value[_TYPE_AT] if entry.tree is None and len(value) > _TYPE_AT else 0
            if kind in held and not _known(records, kind, entry.key):
                held[kind].append((entry.key, value, entry.at))
    for kind, entries in held.items():
        if wanted[kind] >= 0 and len(entries) > wanted[kind]:
            continue
        for key, value, at in entries:
            with contextlib.suppress(IndexDamaged):
                records.take(key, value, at)


def _known(records: Records, kind: int, key: bytes) -> bool:
    """Whether a record was read already, on the way through its tree."""
    number = int.from_bytes(key[:8], "big")
    if kind == _CHILD:
        return key in records.children
    if kind == _NAMESPACE:
        return key in records.roots.values()
    held: dict[int, dict[int, Any]] = {_NODE: records.edges, _USAGE: records.usage, _ROOT: records.roots}
    return number in held.get(kind, {})


def _covered(pages: PageReader, places: Iterable[Place]) -> set[int]:
    """Pages that live blocks take: what engines put there is no page of a tree, whatever it looks like."""
    assert pages.free is not None
    covered: set[int] = set()
    for place in places:
        first = place.value // pages.page_bytes
        if first not in pages.free and place.value % pages.page_bytes == PAGE_HEADER:
            covered.update(range(first, (place.payload + place.header.payload_bytes - 1) // pages.page_bytes + 1))
    return covered


def _self_proving(file: DamagedFile, page_bytes: int, leaves: Iterable[int], records: Records) -> None:
    """Look for what proves itself, wherever it lies: the layouts of namespaces, and if need be the store's identity."""
    for page in leaves:
        raw = file.read(page * page_bytes, page_bytes)
        for entry in parse_leaf(raw, page)[0] if len(raw) == page_bytes else ():
            with contextlib.suppress(IndexDamaged):
                if entry.value[_TYPE_AT : _TYPE_AT + 1] == bytes([_NAMESPACE]) and len(entry.key) == ID_BYTES:
                    records.take_space(NamespaceRecord.decode(entry.key, entry.value))
                elif entry.key == STORE_KEY:
                    record = StoreRecord.decode(entry.value)
                    records.is_store = True
                    records.old_stores.append(record)
