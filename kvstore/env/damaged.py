"""A data file that LMDB must not be let near: read tolerantly, with the pages of its trees parsed here, bounded and checked.

What is read is one snapshot: that of a meta page. Pages that it lists as free are never looked at for what is stored. They may
hold what was never committed (a writer was killed between writing its pages and its meta page, and the next one handed out
the same ids again), and such a record would pass every check of its own and be wrong. So a page counts if the snapshot's trees
lead to it, or, where a tree is broken, if it lies inside the snapshot and is not free: then it is the page that was lost.

The layout of pages is that of LMDB 0.9's mdb.c.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN

__all__ = [
    "LEAF_PAGE",
    "DamagedFile",
    "Entry",
    "Meta",
    "PageReader",
    "Tree",
    "Walk",
    "free_pages",
    "parse_leaf",
    "read_metas",
    "walk_tree",
]

_LMDB_MAGIC, _LMDB_DATA_VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
LEAF_PAGE = 0x02
_P_BRANCH, _P_OVERFLOW, _P_META = 0x01, 0x04, 0x08
_F_BIGDATA, _F_SUBDATA = 0x01, 0x02
_HEADER = struct.Struct("<QHHHH")  # page number, padding, flags, lower, upper
_OVERFLOW = struct.Struct("<QHHI")  # page number, padding, flags, pages
_META = struct.Struct("<IIQQ")  # magic, version, fixed address, map size
_DB = struct.Struct("<IHHQQQQQ")  # padding (page size in the first), flags, depth, branch, leaf, overflow, entries, root
_END = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # low and high half of the size (or page), flags, key's length
_DEEPEST = 16
_PAGE_SIZES = (32768, 16384, 8192, 4096)


class DamagedFile:
    """A data file of which parts may be unreadable. Not thread-safe.

    Attributes
    ----------
    size : int
        Bytes of the file when it was opened.
    unreadable : int
        Sectors of 4 KiB that the disk did not deliver so far; they read as zeros.
    """

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.size = os.fstat(self.fd).st_size
        self.unreadable = 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def read(self, at: int, length: int) -> bytes:
        """Read; shorter at the file's end, however far behind it. Sectors that can't be read are zeros."""
        buffer = bytearray(min(length, max(self.size - at, 0)))  # both may come out of a damaged page
        return bytes(buffer[: self.read_into(at, memoryview(buffer))])

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Read into a buffer as far as the file goes; returns the bytes read."""
        done = 0
        while done < len(buffer) and at + done < self.size:
            try:
                count = os.preadv(self.fd, [buffer[done:]], at + done)
            except OSError:
                count = self._sector(at + done, buffer[done:])
            if not count:
                break
            done += count
        return done

    def _sector(self, at: int, buffer: memoryview) -> int:
        """Read up to the next sector boundary, or zeros instead."""
        length = min(PAYLOAD_ALIGN - at % PAYLOAD_ALIGN, len(buffer), max(self.size - at, 0))
        try:
            return os.preadv(self.fd, [buffer[:length]], at)
        except OSError:
            buffer[:length] = bytes(length)
            self.unreadable += 1
            return length


@dataclass(frozen=True, slots=True)
class Tree:
    """What is recorded of a database: its root, and how many pages and entries its tree has."""

    root: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int

    @classmethod
    def parse(cls, raw: bytes, at: int = 0) -> Tree:
        """Parse an MDB_db."""
        _, _, _, branch, leaf, overflow, entries, root = _DB.unpack_from(raw, at)
        return cls(root, branch, leaf, overflow, entries)


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta page: a snapshot's beginning."""

    page_bytes: int
    map_bytes: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int


def read_metas(file: DamagedFile) -> list[Meta]:
    """The meta pages that parse and whose snapshot can lie in the file, the newest first."""
    first = _parse_meta(file.read(0, 256), 0)
    found = [] if first is None else [first]
    for size in _PAGE_SIZES if first is None else (first.page_bytes,):
        second = _parse_meta(file.read(size, 256), 1)
        if second is not None and second.page_bytes == size:
            found.append(second)
            break
    return sorted(found, key=lambda meta: -meta.transaction)


def _parse_meta(raw: bytes, slot: int) -> Meta | None:
    start = _HEADER.size + _META.size
    if len(raw) < start + 2 * _DB.size + _END.size:
        return None
    page, _, flags, _, _ = _HEADER.unpack_from(raw)
    magic, version, _, map_bytes = _META.unpack_from(raw, _HEADER.size)
    page_bytes = _DB.unpack_from(raw, start)[0]
    last_page, transaction = _END.unpack_from(raw, start + 2 * _DB.size)
    if (page, flags, magic, version) != (slot, _P_META, _LMDB_MAGIC, _LMDB_DATA_VERSION) or page_bytes not in _PAGE_SIZES:
        return None
    if transaction % 2 != slot and transaction:  # a transaction writes the page of its parity
        return None
    free, main = Tree.parse(raw, start), Tree.parse(raw, start + _DB.size)
    return Meta(page_bytes, map_bytes, free, main, last_page, transaction)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a leaf page with what stands beside it: the value, or where it lies in pages of its own, or a database.

    `at` and `length` say where the value lies in the file.
    """

    key: bytes
    value: bytes
    at: int
    length: int
    page: int = 0  # of the value, if it has pages of its own
    tree: Tree | None = None


@dataclass(slots=True)
class PageReader:
    """Pages of a snapshot. Gives none that the snapshot doesn't hold, or that doesn't name itself.

    Attributes
    ----------
    last_page : int
        The snapshot's last page.
    free : set of int
        Pages that hold nothing; None where the free list can't be read.
    reached : set of int
        Pages that were given on the present walk: a page is given once.
    led_to_free : bool
        Whether a page was asked for that is free: then tree and list are not of one snapshot.
    """

    file: DamagedFile
    page_bytes: int
    last_page: int
    free: set[int] | None = None
    reached: set[int] = field(default_factory=set)
    led_to_free: bool = False

    def page(self, number: int, flags: int) -> bytes | None:
        """A page of exactly these flags, once; None where it isn't one."""
        if self.free is not None and number in self.free:
            self.led_to_free = True
            return None
        if not 2 <= number <= self.last_page or number in self.reached:
            return None
        raw = self.file.read(number * self.page_bytes, self.page_bytes)
        if len(raw) < self.page_bytes or _HEADER.unpack_from(raw)[:3:2] != (number, flags):
            return None
        self.reached.add(number)
        return raw

    def tree_page(self, number: int) -> tuple[bytes, bool] | None:
        """A branch or leaf page, and whether it is a leaf."""
        for flags in (LEAF_PAGE, _P_BRANCH):
            raw = self.page(number, flags)
            if raw is not None:
                return raw, flags == LEAF_PAGE
        return None

    def value(self, entry: Entry, longest: int) -> bytes:
        """The value of an entry, also where it has pages of its own; empty where those aren't what they should be."""
        if not entry.page:
            return entry.value
        if entry.length > longest or not 2 <= entry.page <= self.last_page or (self.free and entry.page in self.free):
            return b""
        raw = self.file.read(entry.page * self.page_bytes, PAGE_HEADER + entry.length)
        if len(raw) < PAGE_HEADER + entry.length or _OVERFLOW.unpack_from(raw)[:3:2] != (entry.page, _P_OVERFLOW):
            return b""
        return raw[PAGE_HEADER:]


def parse_leaf(raw: bytes, page: int) -> tuple[list[Entry], bool]:
    """The entries of leaf page number `page` that lie inside it, and whether all do."""
    found = []
    whole = True
    for at, size_low, size_high, flags, key_bytes in _nodes(raw):
        start = at + _NODE.size + key_bytes
        length = size_low | size_high << 16
        stored = 8 if flags & _F_BIGDATA else length
        if at < 0 or start + stored > len(raw):
            whole = False
            continue
        key, value = raw[at + _NODE.size : start], raw[start : start + stored]
        if flags == 0:
            found.append(Entry(key, value, page * len(raw) + start, length))
        elif flags == _F_BIGDATA:
            elsewhere = int.from_bytes(value, "little")
            found.append(Entry(key, b"", elsewhere * len(raw) + PAGE_HEADER, length, elsewhere))
        elif flags == _F_SUBDATA and length == _DB.size:
            found.append(Entry(key, b"", page * len(raw) + start, length, tree=Tree.parse(value)))
        else:
            whole = False
    return found, whole and bool(found)


def _nodes(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Where each node of a page lies (negative if not in it) and what its header says."""
    lower = _HEADER.unpack_from(raw)[3]
    count = max(min(lower, len(raw)) - PAGE_HEADER, 0) // 2
    for at in struct.unpack_from(f"<{count}H", raw, PAGE_HEADER):
        if not PAGE_HEADER + 2 * count <= at <= len(raw) - _NODE.size:
            yield -1, 0, 0, 0, 0
        else:
            yield at, *_NODE.unpack_from(raw, at)


def _children(raw: bytes) -> tuple[list[tuple[bytes, int]], bool]:
    """What a branch page leads to, and whether all of it could be read."""
    found = []
    whole = True
    for at, low, high, flags, key_bytes in _nodes(raw):
        if at < 0 or at + _NODE.size + key_bytes > len(raw):
            whole = False
            continue
        found.append((raw[at + _NODE.size : at + _NODE.size + key_bytes], low | high << 16 | flags << 32))
    return found, whole and bool(found)


@dataclass(slots=True)
class Walk:
    """What was found on the way through a tree.

    Attributes
    ----------
    entries, leaf_pages, branch_pages : int
        How many.
    whole : bool
        Whether the tree is all that it is recorded to be.
    """

    entries: int = 0
    leaf_pages: int = 0
    branch_pages: int = 0
    whole: bool = True


def walk_tree(pages: PageReader, tree: Tree, visit: Callable[[Entry], object], order: Callable[[bytes], object] = bytes) -> Walk:
    """Walk a tree as far as its pages are sane, and visit its entries. Keys that don't belong where they stand are left out.

    Parameters
    ----------
    order : callable
        Gives what the tree's keys sort by.
    """
    walk = Walk()
    pages.reached.clear()
    if tree.root != _NO_PAGE:
        _walk(pages, tree.root, None, None, visit, order, walk, 0)
    counted = (walk.branch_pages, walk.leaf_pages, walk.entries)
    walk.whole = walk.whole and counted == (tree.branch_pages, tree.leaf_pages, tree.entries)
    return walk


def _walk(
    pages: PageReader,
    number: int,
    low: object,
    high: object,
    visit: Callable[[Entry], object],
    order: Callable[[bytes], object],
    walk: Walk,
    depth: int,
) -> None:
    got = pages.tree_page(number) if depth < _DEEPEST else None
    if got is None:
        walk.whole = False
        return
    raw, leaf = got
    if leaf:
        walk.leaf_pages += 1
        found, whole = parse_leaf(raw, number)
        inside = [e for e in found if _between(order(e.key), low, high)]
        walk.whole = walk.whole and whole and len(inside) == len(found)
        walk.entries += len(inside)
        for entry in inside:
            visit(entry)
        return
    walk.branch_pages += 1
    children, whole = _children(raw)
    walk.whole = walk.whole and whole
    for index, (key, child) in enumerate(children):
        # the first key of a branch page stands for all that come before the second
        least = low if index == 0 else order(key)
        most = order(children[index + 1][0]) if index + 1 < len(children) else high
        _walk(pages, child, least, most, visit, order, walk, depth + 1)


def _between(key: object, low: object, high: object) -> bool:
    return (low is None or key >= low) and (high is None or key < high)  # type: ignore[operator]  # both of one order


def free_pages(pages: PageReader, tree: Tree) -> set[int] | None:
    """The pages that a snapshot lists as free, its lists' own not among them; None where the lists can't all be read."""
    entries: list[Entry] = []
    if not walk_tree(pages, tree, entries.append, lambda key: int.from_bytes(key, "little")).whole:
        return None
    free: set[int] = set()
    for entry in entries:
        raw = pages.value(entry, 8 * (pages.last_page + 2))
        count = int.from_bytes(raw[:8], "little")
        if len(entry.key) != 8 or len(raw) < 8 or len(raw) < 8 * (count + 1):
            return None
        listed = struct.unpack_from(f"<{count}Q", raw, 8)
        if any(not 2 <= page <= pages.last_page for page in listed):
            return None
        free.update(listed)
    return free if free.isdisjoint(pages.reached) else None
