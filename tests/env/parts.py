"""Which part of a store's file each page is: read from LMDB's own structures, for tests that damage all of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.env.pages import read_facts
from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN

__all__ = ["Parts", "parts_of"]

_BRANCH, _OVERFLOW = 0x01, 0x04
_BIG, _SUB = 0x01, 0x02
_NO_PAGE = (1 << 64) - 1
_DB = struct.Struct("<IHHQQQQQ")
_WORD = struct.Struct("<Q")
_FREE_LIST_AT = PAGE_HEADER + 24  # in a meta page: the record of the list of free pages, then that of the main database
_TRANSACTION_AT = _FREE_LIST_AT + 2 * _DB.size + 8


@dataclass(slots=True)
class Parts:
    """The file's parts, and for each the runs of bytes (offset, length) that are of it.

    `live_pages` are those of meta pages and trees but for the list of free pages; `lost_pages` are neither in use nor on that list.
    """

    page_bytes: int
    runs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    live_pages: int = 0
    lost_pages: int = 0

    def add(self, part: str, offset: int, length: int) -> None:
        """Note that a run of bytes is of a part."""
        self.runs.setdefault(part, []).append((offset, length))


def parts_of(data: Path) -> Parts:
    """Tell the parts of a whole file apart: meta pages, trees by database, headers and payloads of blocks, and what is free."""
    facts, raw = read_facts(str(data)), data.read_bytes()
    size = facts.page_bytes
    parts, used = Parts(size), {0, 1}
    for page in (0, 1):
        parts.add("meta", page * size, 200)
    newest = max((0, 1), key=lambda page: _WORD.unpack_from(raw, page * size + _TRANSACTION_AT)[0])
    at = newest * size + _FREE_LIST_AT

    listed: list[int] = []  # as free

    def walk(page: int, name: str) -> None:
        used.add(page)
        start = page * size
        flags, lower = struct.unpack_from("<HH", raw, start + 10)
        parts.add(f"branch of {name}" if flags & _BRANCH else f"leaf of {name}", start, size)
        for place in range((lower - PAGE_HEADER) // 2):
            node = start + int.from_bytes(raw[start + PAGE_HEADER + 2 * place : start + PAGE_HEADER + 2 * place + 2], "little")
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", raw, node)
            if flags & _BRANCH:
                walk(low | high << 16 | node_flags << 32, name)
                continue
            value = node + 8 + key_bytes
            if node_flags & _SUB:
                root = _DB.unpack_from(raw, value)[7]
                if root != _NO_PAGE:
                    walk(root, raw[node + 8 : value].decode())
            else:
                if node_flags & _BIG:
                    page_of_value = int.from_bytes(raw[value : value + 8], "little")
                    large(page_of_value, name)
                    value = page_of_value * size + PAGE_HEADER
                if name == "the free list":
                    count = _WORD.unpack_from(raw, value)[0]
                    listed.extend(struct.unpack_from(f"<{count}Q", raw, value + 8))

    def large(page: int, name: str) -> None:
        start = page * size
        flags, count = struct.unpack_from("<H", raw, start + 10)[0], struct.unpack_from("<I", raw, start + 12)[0]
        assert flags & _OVERFLOW
        used.update(range(page, page + count))
        if name == "blocks":
            parts.add("header of a block", start, PAYLOAD_ALIGN)
            parts.add("payload", start + PAYLOAD_ALIGN, count * size - PAYLOAD_ALIGN)
        else:
            parts.add(f"values of {name}", start, count * size)

    for name, place in (("the free list", at), ("main", at + _DB.size)):
        root = _DB.unpack_from(raw, place)[7]
        before = len(used)
        if root != _NO_PAGE:
            walk(root, name)
        parts.live_pages = len(used) - before + 2  # in the end: of the main database
    assert not used & set(listed)
    parts.lost_pages = facts.last_page + 1 - len(used) - len(listed)
    for page in range(facts.last_page + 1):
        if page not in used:
            parts.add("free", page * size, size)
    return parts
