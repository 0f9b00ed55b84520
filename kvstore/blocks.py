"""The block table: blocks put once, counted, found, marked as bad.

A block is immutable. `blocks` holds its bytes, `refs` where they lie and how many index records refer to them; the block goes
when the last reference goes. `bad` names blocks that failed their checks; nobody matches through them until a save produces
the same id again and so heals every session that refers to it.

A block whose first page can't be read can't be freed by LMDB either. Its bytes stay where they are, with a count of 0 and marked
as bad, until the store is repaired.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.env import Environment, Reader, Writer
from kvstore.errors import BlockDamaged, IndexDamaged
from kvstore.records.block import BadRecord, BlockHeader, Geometry, Ref, header_bytes
from kvstore.records.columns import RefColumns, header_heads
from kvstore.records.constants import PAGE_HEADER

__all__ = [
    "PreparedBlock",
    "bad_blocks",
    "counted",
    "drop_reference",
    "find",
    "find_each",
    "mark_bad",
    "missing",
    "offset_of",
    "pages_to_put",
    "put",
    "read_header",
    "read_headers",
    "set_count",
    "take_reference",
]


_log = logging.getLogger("kvstore")


@dataclass(slots=True)
class PreparedBlock:
    """A block ready to be put: its value is complete in memory, hashed and summed. Owned by the save that made it.

    Attributes
    ----------
    header : BlockHeader
        Id, kind, tokens and sums.
    value : ndarray
        uint8, the whole value: encoded header, padding, payload, padding. Writable memory of the save's.
    merged : int
        Leading rows (positions) that were taken from the stored block before it, since what was first saved stays.
    """

    header: BlockHeader
    value: npt.NDArray[np.uint8]
    merged: int = field(default=0)

    @property
    def block_id(self) -> bytes:
        """The block's id."""
        return self.header.block_id

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        """The payload inside the value."""
        start = self.header.padded_bytes
        return self.value[start : start + self.header.payload_bytes]


def find(txn: Reader | Writer, block_id: bytes) -> Ref | None:
    """Look up where a block lies; None when it isn't stored. Raises IndexDamaged."""
    raw = txn.get(block_id, txn.db.refs)
    return None if raw is None else Ref.decode(block_id, raw)


def find_each(txn: Reader, block_ids: Sequence[bytes]) -> RefColumns:
    """Look up many blocks at once. A record that is missing or damaged is one that isn't `whole`; `find` says what is wrong."""
    return RefColumns.decode(block_ids, txn.get_each(block_ids, txn.db.refs))


def offset_of(txn: Reader | Writer, block_id: bytes) -> int | None:
    """Where a block's payload lies; None when its reference record is missing or damaged."""
    try:
        ref = find(txn, block_id)
    except IndexDamaged:
        return None
    return None if ref is None else ref.offset


def missing(block_id: bytes) -> IndexDamaged:
    """The error for a block that the index refers to and the table does not have."""
    return IndexDamaged(f"the index refers to block {block_id.hex()}, which is not stored; verify the store")


def bad_blocks(txn: Reader | Writer) -> frozenset[bytes]:
    """Ids of the blocks that are marked as bad. Costs next to nothing when there are none."""
    if not txn.entries(txn.db.bad):
        return frozenset()
    return frozenset(key for key, _ in txn.items(txn.db.bad, keys_only=True))


def mark_bad(txn: Writer, block_id: bytes) -> None:
    """Note durably that a block failed its checks, also where it is its reference record that was lost.

    The mark goes when the block is put anew or its last reference goes.
    """
    txn.put(txn.db.bad, block_id, BadRecord(time.time_ns() // 1000).encode(block_id))


def pages_to_put(txn: Reader | Writer, blocks: list[PreparedBlock], geometry: Geometry) -> int:
    """Pages that putting these blocks adds, not counting those that are stored already."""
    return sum(geometry.pages(block.value.nbytes) for block in blocks if txn.get(block.block_id, txn.db.refs) is None)


def put(txn: Writer, block: PreparedBlock) -> int:
    """Store a block if its id isn't stored, and take one reference to it. Returns the bytes of the value if it was written.

    A block that was marked as bad is stored anew under its id, and the mark is cleared.

    Raises
    ------
    MapFull
        When there is no run of pages for it; the transaction must be aborted.
    BlockDamaged
        When what is stored under the id is bad and can't be replaced. Nothing is changed.
    """
    try:
        ref = find(txn, block.block_id)
    except IndexDamaged:
        txn.damage = True
        ref = None  # the count is lost; if it comes out too small, a session that refers to the block misses it cleanly
    healing = ref is not None and txn.get(block.block_id, txn.db.bad) is not None
    if ref is not None and not healing:
        txn.put(txn.db.refs, block.block_id, ref.counted(1).encode(block.block_id))
        return 0
    if ref is not None and not txn.can_free(block.block_id, ref.offset, ref.pages):
        raise BlockDamaged(
            f"block {block.block_id.hex()}: its first page can't be read, so its bytes can't be replaced by those that are saved "
            "again; `python -m kvstore repair` does it",
            block_id=block.block_id,
            offset=ref.offset,
        )
    count = (ref.count if ref is not None else 0) + 1
    _write_value(txn, block, count)
    txn.delete(txn.db.bad, block.block_id)
    return block.value.nbytes


def _write_value(txn: Writer, block: PreparedBlock, count: int) -> None:
    """Write a block's value and its reference record with this count."""
    header = block.header
    offset = txn.put_block(block.block_id, block.value.data) + header.padded_bytes
    pages = -(-(PAGE_HEADER + block.value.nbytes) // txn.page_bytes)
    ref = Ref(count, header.kind, pages, offset, header.payload_bytes, header.tokens)
    txn.put(txn.db.refs, block.block_id, ref.encode(block.block_id))


def counted(txn: Reader | Writer, block_id: bytes) -> bool:
    """Whether a block has a reference record that can be read."""
    try:
        return find(txn, block_id) is not None
    except IndexDamaged:
        return False


def take_reference(txn: Writer, block_id: bytes) -> None:
    """Count one more reference to a stored block. Raises IndexDamaged when it isn't stored."""
    ref = find(txn, block_id)
    if ref is None:
        raise missing(block_id)
    txn.put(txn.db.refs, block_id, ref.counted(1).encode(block_id))


def drop_reference(txn: Writer, block_id: bytes) -> int:
    """Give one reference back; the last one removes the block. Returns the pages that were freed: none, where they can't be.

    A block whose reference record is missing or damaged can be read by nobody: what is left of it goes as well.
    """
    try:
        ref = find(txn, block_id)
    except IndexDamaged:
        ref = None
    txn.damage = txn.damage or ref is None
    if ref is not None and ref.count > 1:
        txn.put(txn.db.refs, block_id, ref.counted(-1).encode(block_id))
        return 0
    removed = _remove(txn, block_id, ref)
    return ref.pages if ref is not None and removed else 0


def set_count(txn: Writer, block_id: bytes, count: int) -> None:
    """Correct a reference count after damage. 0 removes the block, and so does a reference record that can't be read."""
    try:
        ref = find(txn, block_id)
    except IndexDamaged:
        ref = None
    if ref is None or not count:
        _remove(txn, block_id, ref)
    else:
        txn.put(txn.db.refs, block_id, ref.counted(count - ref.count).encode(block_id))


def _remove(txn: Writer, block_id: bytes, ref: Ref | None) -> bool:
    """Remove a block; False where its bytes have to stay: then nothing refers to it any more, and nobody tries again."""
    if ref is not None and not txn.can_free(block_id, ref.offset, ref.pages):
        _log.error(
            "block %s can't be freed, since its first page can't be read: %d pages are taken until `python -m kvstore repair`",
            block_id.hex(),
            ref.pages,
        )
        txn.put(txn.db.refs, block_id, ref.counted(-ref.count).encode(block_id))
        mark_bad(txn, block_id)
        txn.stuck.append(block_id)
        return False
    for database in (txn.db.refs, txn.db.bad, txn.db.blocks):
        txn.delete(database, block_id)
    if ref is not None:
        txn.freed.append((ref.offset, ref.payload_bytes))
    return True


def read_header(environment: Environment, block_id: bytes, ref: Ref, sums: int, namespace: bytes | None = None) -> BlockHeader:
    """Read and check the header of a block at its recorded offset, by pread: a bad sector is an error, not a signal.

    Raises
    ------
    BlockDamaged
        When what lies there is not this block's header.
    """
    padded = header_bytes(sums)
    if not padded <= ref.offset <= environment.map_bytes - ref.payload_bytes:
        raise BlockDamaged(
            f"block {block_id.hex()}: its {ref.payload_bytes} bytes at {ref.offset} do not lie in the file",
            block_id=block_id,
            offset=ref.offset,
        )
    try:
        raw = environment.pread(BlockHeader.encoded_bytes(sums), ref.offset - padded)
        header = BlockHeader.decode(raw)
    except (OSError, IndexDamaged) as error:
        raise BlockDamaged(f"block {block_id.hex()}: {error}", block_id=block_id, offset=ref.offset) from error
    found = (header.block_id, header.kind, header.tokens, header.payload_bytes, len(header.sums))
    if found != (block_id, ref.kind, ref.tokens, ref.payload_bytes, sums) or namespace not in (None, header.namespace):
        raise BlockDamaged(f"block {block_id.hex()}: its header is that of another block", block_id=block_id, offset=ref.offset)
    return header


def read_headers(
    environment: Environment, block_ids: Sequence[bytes], refs: RefColumns, sums: int, namespace: bytes
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Read and check the headers of many blocks of one namespace at once; those that aren't in the page cache, side by side.

    Every check of `read_header` is made.

    Returns
    -------
    found : uint32 array of shape (blocks, sums)
        The checksums of each block; they mean nothing where it isn't whole.
    whole : bool array of shape (blocks,)
        Whether the block's reference record and its header are. `find` and `read_header` say what is wrong with one.
    """
    padded = header_bytes(sums)
    inside = (refs.offset >= padded) & (refs.payload_bytes >= 0) & (refs.offset <= environment.map_bytes - refs.payload_bytes)
    whole = refs.whole & inside
    # what isn't whole is read at 0, where no header can lie
    starts = np.where(whole, refs.offset - padded, 0)
    found, status = environment.read_headers(starts, header_heads(block_ids, refs, sums, namespace), sums)
    return found, whole & (status == 0)
