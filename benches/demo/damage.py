"""The fault of the negative control: one byte of one stored block, flipped in the store's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore import Store
from kvstore.layout import Layout

__all__ = ["Damage", "flip_one_byte"]

_DATA = "data.mdb"


@dataclass(frozen=True)
class Damage:
    """Which block was damaged.

    Attributes
    ----------
    index, blocks : int
        Its place among the blocks of the session, and how many there are.
    position : int
        The first token position that it holds.
    offset : int
        The byte of the file that was flipped.
    """

    index: int
    blocks: int
    position: int
    offset: int


def flip_one_byte(path: Path, layout: Layout, tokens: Sequence[int], shared: int) -> Damage:
    """Flip a byte in the middle of a block half-way through what `tokens` do not share with other sessions."""
    with Store.open(path) as store, store.namespace(layout, salt=b"").lease(tokens) as lease:
        index = (shared + len(tokens)) // 2 // layout.block_tokens
        block = lease.blocks[index]
        damage = Damage(index, len(lease.blocks), index * layout.block_tokens, block.file_offset + block.payload_bytes // 2)
    with (path / _DATA).open("r+b") as file:
        file.seek(damage.offset)
        byte = file.read(1)
        file.seek(damage.offset)
        file.write(bytes([byte[0] ^ 0x10]))
    return damage
