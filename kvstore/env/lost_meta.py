"""Meta pages that are lost: a snapshot found again by the two pages it consists of, its list of databases and its free list.

Every transaction writes both anew. The newest pair is known by the free list, whose keys are the transactions that freed
something: old pages are listed in it, and what is current is not. A pair counts only if nothing that its trees lead to is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.env.damaged import DamagedFile, Entry, Meta, PageReader, Tree, free_pages, parse_leaf, walk_tree
from kvstore.records.constants import DATABASES

__all__ = ["rebuild_meta"]

_NAMES = {name.encode() for name in DATABASES}
_INDEX = (b"namespaces", b"roots", b"nodes", b"children")
_LISTS_TRIED = 4  # of which the index may be damaged as well


@dataclass(frozen=True, slots=True)
class _FreeList:
    newest: int  # the last transaction in it
    tree: Tree
    free: set[int]


def rebuild_meta(file: DamagedFile, page_bytes: int, leaves: Iterable[int], last_page: int | None = None) -> Meta | None:
    """The newest snapshot whose pages are all in their places, or None. Its map size is not known: 0.

    Parameters
    ----------
    leaves : iterable of int
        The pages that say they are leaves.
    last_page : int, optional
        The last page that the file has had, if that is known. By default the one with which it ends.
    """
    mains: list[Tree] = []
    lists: list[_FreeList] = []
    last_page = file.size // page_bytes - 1 if last_page is None else last_page
    for page in leaves:
        raw = file.read(page * page_bytes, page_bytes)
        entries, whole = parse_leaf(raw, page) if len(raw) == page_bytes else ([], False)
        if not whole:
            continue
        tree = Tree(page, 0, 1, 0, len(entries))
        if {e.key for e in entries} == _NAMES and all(e.tree is not None for e in entries):
            mains.append(tree)
        elif all(len(e.key) == 8 and e.tree is None for e in entries):
            free = free_pages(PageReader(file, page_bytes, last_page), tree)
            if free is not None:
                lists.append(_FreeList(max(int.from_bytes(e.key, "little") for e in entries), tree, free))
    loose: Meta | None = None
    lists.sort(key=lambda found: -found.newest)
    for tried, (_, group) in enumerate(itertools.groupby(lists, key=lambda found: found.newest)):
        complete: dict[int, Meta] = {}
        for found in group:
            for main in mains:
                if main.root in found.free or (tried >= _LISTS_TRIED and loose is not None):
                    continue
                meta = Meta(page_bytes, 0, found.tree, main, last_page, found.newest)
                consistent, index_whole = _examined(file, meta, found.free)
                if consistent and index_whole:
                    complete[main.root] = meta
                elif consistent and tried < _LISTS_TRIED:
                    loose = loose or meta
        if len(complete) == 1:  # of two one was never committed, and nothing says which
            return next(iter(complete.values()))
    return loose


def _examined(file: DamagedFile, meta: Meta, free: set[int]) -> tuple[bool, bool]:
    """Whether a pair belongs together (its trees lead to nothing that is free, and one is all that it should be), and whether
    all of the index is.
    """
    pages = PageReader(file, meta.page_bytes, meta.last_page, free)
    databases: list[Entry] = []
    if not walk_tree(pages, meta.main, databases.append).whole:
        return False, False
    walks = {e.key: walk_tree(pages, e.tree, lambda _: None) for e in databases if e.tree is not None}
    consistent = not pages.led_to_free and any(walk.whole and walk.entries for walk in walks.values())
    return consistent, all(walks[name].whole for name in _INDEX)
