"""Where kvstore is not ahead: every such row of the comparison, with what is known of the reason."""

from __future__ import annotations

from collections.abc import Sequence

from benches.harness import Cell, Table, median
from benches.peers.measure import Compared, Side, ratios

__all__ = ["MEASURES", "behind", "ratio"]

MEASURES: dict[str, str] = {
    "warm": "warm restore",
    "first": "warm restore, the first after opening",
    "cold": "cold restore",
    "shared": "restore of a shared prefix",
    "turn_durable": "the tenth turn's save",
}
"""What is compared by time, and how it is called."""

_SAVE = "save_durable"
_DISK = "disk"
_REASONS = {
    "warm": "Both are bounded by memory; where the arrays fit into the processor's caches, plain copies into them gain.",
    "first": "The first touch of the map's pages is part of it: once in a store's life, where others map a file at each restore.",
    "cold": (
        "Blocks are read past the page cache, with at least eight reads of at most 1 MiB under way (LEAST_READERS in "
        "native/restore.c). Where the system reads ahead by more (read_ahead_kb of the device), or others use the device "
        "too, a buffered read has more under way."
    ),
    "shared": "As for a warm restore.",
    "turn_durable": (
        "The first block is gathered, summed and hashed (BLAKE3, so that equal blocks are stored once) before the disk has "
        "anything to do, and a save waits for the disk twice: for its pages, then for the page that makes them count. Files are "
        "handed to the disk at once, and for a store that never syncs what is timed is one wait for each."
    ),
    _SAVE: (
        "A long session becomes durable in pieces of 16 MiB, so that a crash leaves a valid shorter prefix and other writers wait "
        "for one piece: between two pieces the disk has nothing to do for some milliseconds. A file written whole is synced once."
    ),
    _DISK: (
        "A branch's first block is saved whole from its start, so smaller chunks share more (block_tokens sets it); "
        "header and payload of a block end in a page of the file, which leaves part of the last one empty; and the index has a "
        "region of its own, 1/256 of the cap, which counts for more where a store isn't full."
    ),
}
_LLAMA = {
    "warm": (
        "promote copies chunks of a block into three small buffers by turns, checked, and llama.cpp copies them from there to its "
        "cells; a slot file goes through a buffer of one layer's rows. Both read the page cache once and write the cells once, "
        "which is what the memory has to do; a promote finds the prefix besides, and each chunk is a call of llama.cpp that looks "
        "at all its cells."
    ),
    "first": (
        "As for a warm restore; in a new process the pages of the map have to be found first, which a file that is read needs "
        "nothing of, and those of the buffers to be made."
    ),
    "cold": (
        "Two chunks are read at once, past the page cache, and handed to llama.cpp in order; where the device gives all it has to "
        "the system's read-ahead of a slot file, finding the prefix first and the last chunk's copy are what is left."
    ),
    "shared": (
        "As for a warm restore; and where a prefix ends inside a block, the last chunk lies in a blob of another form, which is "
        "described anew unless one of the last 32 had that length."
    ),
}


def ratio(one: Compared, name: str, own: str = "") -> float | None:
    """The median over the rounds of a peer's time over kvstore's; None when there is none."""
    theirs: list[float] = getattr(one.theirs, own or name)
    ours: list[float] = getattr(one.ours, name)
    return median(ratios(theirs, ours)) if theirs and ours else None


def _disk(theirs: Side, ours: Side) -> float | None:
    return theirs.disk / ours.disk if theirs.disk and ours.disk else None


def behind(done: Sequence[Compared]) -> Table:
    """A row for each measurement and peer in which kvstore takes more."""
    rows: list[tuple[Cell, ...]] = []
    names = {**MEASURES, _SAVE: "saving a first session", _DISK: "bytes on disk with a shared prefix"}
    for name, what in names.items():
        for one in done:
            value = _disk(one.theirs, one.ours) if name == _DISK else ratio(one, name)
            if value is not None and value < 1:
                known = {**_REASONS, **_LLAMA} if one.peer.group == "llama.cpp" else _REASONS
                rows.append((what, one.peer.name, one.peer.checks or "nothing", value, known[name]))
    return Table(
        "Where kvstore is not ahead",
        ("what", "store", "checks", "times kvstore's", "what is known of the reason"),
        tuple(rows),
        "As into the engine's arrays, and until durable. Between 0.95 and 1.05 a busy machine decides.",
    )
