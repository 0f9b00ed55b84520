"""Checking while saving: do the rows that are stored already equal the ones that this engine has computed?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.arrays import StreamArray
from kvstore.errors import IndexDamaged
from kvstore.ids import ID_BYTES
from kvstore.radix import walk
from kvstore.saving.gather import gather_rows, merge_stored, release
from kvstore.scope import NamespaceScope

__all__ = ["Comparison", "compare_stored"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Blocks of a session that were stored already, compared with the engine's.

    Attributes
    ----------
    checked : int
        Blocks compared; those before the first given row can't be.
    differing : tuple of int
        First positions of the blocks that differ.
    """

    checked: int = 0
    differing: tuple[int, ...] = ()


def compare_stored(scope: NamespaceScope, prompt: bytes, arrays: Mapping[str, StreamArray], origin: int, base: int) -> Comparison:
    """Compare the rows of [origin, base), which are stored, with the arrays'. A few blocks are in memory at a time."""
    size = scope.layout.block_tokens
    checked = 0
    differing: list[int] = []
    with scope.store.environment.reading() as txn:
        path = walk(txn, scope.root(txn), prompt[: 4 * base])
        if path.matched < base:
            raise IndexDamaged("the stored prefix became shorter while it was being compared")  # caught by the save: it retries
        stored = path.block_ids(size)
        step = size * max(1, (8 << 20) // max(scope.layout.payload_bytes(size), 1))
        for first in range(origin, base, step):
            stop = min(first + step, base)
            prepared = gather_rows(scope, arrays, origin, first, stop)
            for index, block in prepared.items():
                whole = (index + 1) * size <= base
                if whole:
                    equal = block.block_id == stored[ID_BYTES * index : ID_BYTES * (index + 1)]
                else:
                    mine = np.array(block.payload)
                    merged = merge_stored(scope, txn, block, path.partial_block(base, size), base % size)
                    equal = merged is not None and np.array_equal(mine, merged.payload)
                checked += 1
                if not equal:
                    differing.append(index * size)
            release(scope, prepared.values())
    return Comparison(checked, tuple(differing))
