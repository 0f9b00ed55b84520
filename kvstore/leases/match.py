"""Matching: how many leading tokens of a prompt can be restored, and from which blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore.env import Reader
from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.radix import Path, walk
from kvstore.records.node import Checkpoint, split_ids
from kvstore.scope import NamespaceScope

__all__ = ["Found", "Match", "find_prefix"]

_log = logging.getLogger("kvstore")


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt. A promise of nothing: another process may evict it the next moment; a lease holds it.

    Attributes
    ----------
    length : int
        Leading tokens that can be restored. With states in the layout, the position of a checkpoint.
    stored_tokens : int
        Leading tokens whose rows are stored; more than `length` where states or the limit stand in between.
    """

    length: int
    stored_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """A restorable prefix as the index describes it.

    Attributes
    ----------
    length : int
        Leading tokens that can be restored; 0 for a miss.
    path : Path
        The nodes that hold them.
    checkpoint : Checkpoint or None
        The states at `length`, for a layout that has any.
    """

    length: int
    path: Path
    checkpoint: Checkpoint | None

    def blocks(self, block_tokens: int) -> list[bytes]:
        """Ids of the blocks that hold the rows, in order; the last may hold more rows than are wanted."""
        if not self.length:
            return []
        whole = self.length // block_tokens
        ids = split_ids(self.path.block_ids(block_tokens)[: ID_BYTES * whole])
        if len(ids) != whole:
            raise IndexDamaged(
                f"the path holds {len(ids)} whole blocks of {self.length} tokens, expected {whole}; verify the store"
            )
        if self.length % block_tokens:
            ids.append(self.path.partial_block(self.length, block_tokens))
        return ids


def find_prefix(scope: NamespaceScope, txn: Reader, prompt: bytes, limit: int) -> Found:
    """Find the longest prefix, at most `limit` tokens, that can be restored without a block that is refused."""
    path = walk(txn, scope.root(txn), prompt, tolerant=True)
    if path.damage is not None:
        _log.warning("a match ends at %d tokens: %s", path.matched, path.damage)
    bad = scope.store.bad(txn)
    length = path.sound(min(path.matched, limit), scope.layout.block_tokens, bad)
    if not scope.layout.states:
        return Found(length, path, None)
    usable = [c for _, c in path.checkpoints() if c.position <= length and (not bad or bad.isdisjoint(split_ids(c.blocks)))]
    if not usable:
        return Found(0, path, None)
    return Found(usable[-1].position, path, usable[-1])
