"""Publishing: prepared blocks into the store, one transaction at a time, each leaving a valid, longer prefix."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore import blocks as table
from kvstore.blocks import PreparedBlock
from kvstore.env import Writer, this_process
from kvstore.radix import Grown, Path, Removed, checkpoints, cut_damage, grow, nodes, unfinished, walk
from kvstore.records.block import Geometry
from kvstore.saving.ahead import ComingRows
from kvstore.saving.gather import merge_stored, release
from kvstore.scope import NamespaceScope, SaveUnderWay

__all__ = ["Piece", "StatesPiece", "publish_piece", "publish_states"]

_log = logging.getLogger("kvstore")


@dataclass(slots=True)
class StatesPiece:
    """Some of the blocks of a checkpoint's packed states.

    Attributes
    ----------
    blocks : sequence of PreparedBlock
        In order.
    packed_bytes : int
        Length of all packed states of the checkpoint.
    last : bool
        Whether these are the last ones, so that the checkpoint becomes complete.
    before : int
        Blocks of the checkpoint that earlier pieces brought.
    """

    blocks: Sequence[PreparedBlock]
    packed_bytes: int
    last: bool
    before: int = 0


@dataclass(slots=True)
class Piece:
    """What one transaction publishes: rows up to a position, and maybe states at it.

    The pieces of one save share their `save`, and all that are followed by others say that there is `more`. Whoever publishes them
    gives the save up in the end (`StoreScope.give_up`).
    """

    prompt: bytes
    rows: dict[int, PreparedBlock] | ComingRows
    states: StatesPiece | None = None
    save: SaveUnderWay = field(default_factory=SaveUnderWay)
    more: bool = False

    @property
    def blocks(self) -> list[PreparedBlock]:
        """All blocks of the piece, once they are prepared."""
        return [*self.rows.values(), *self._state_blocks]

    @property
    def _state_blocks(self) -> Sequence[PreparedBlock]:
        return self.states.blocks if self.states is not None else ()

    def most_pages(self, geometry: Geometry) -> int:
        """The most pages that its blocks may take. Waits for none of them."""
        return len(self.rows) * geometry.full_pages + sum(geometry.pages(block.value.nbytes) for block in self._state_blocks)

    @property
    def size(self) -> int:
        """Bytes of the blocks' values."""
        return sum(block.value.nbytes for block in self.blocks)

    def release(self, scope: NamespaceScope) -> None:
        """Give the buffers of the blocks back. Nobody looks at the piece afterwards."""
        rows = self.rows.had if isinstance(self.rows, ComingRows) else self.rows.values()
        release(scope, [*rows, *self._state_blocks])


def publish_piece(scope: NamespaceScope, piece: Piece, *, durable: bool = True) -> Grown:
    """Publish a piece.

    Walks the index anew: what another process has stored meanwhile is skipped, a node that is longer already is success.

    Parameters
    ----------
    durable : bool
        False where more pieces follow at once and the last of them is durable.

    Raises
    ------
    BaseLost
        When what is stored doesn't reach the piece any more.
    StoreFullError, SpacePinned, DiskError, WriteLockTimeout
    """
    keep: set[int] = set()
    evicted: list[Removed] = []  # by try; the last one counts
    given = piece.save.save_id

    def work(txn: Writer) -> Grown:
        piece.save.save_id = given  # one handed out by a try that was aborted may be handed out again
        path = walk(txn, scope.ensure_root(txn), piece.prompt, tolerant=True)
        if path.damage is not None:
            _log.warning("a damaged part of the index is cut off and saved anew: %s", path.damage)
            cut_damage(txn, path, piece.prompt)
        keep.clear()
        keep.update(node.node for node in path.nodes)
        _merge(scope, txn, piece, path, scope.store.bad(txn))
        evicted.append(_make_room(scope, txn, piece, keep))
        root = scope.ensure_root(txn)  # making room may have taken the namespace's last session, and the root with it
        scope.store.mark_damaged(txn)  # merging may have found damage; what is put now heals it
        _begin_or_end(scope, txn, piece)
        grown = grow(txn, root, piece.prompt, piece.rows, scope.limit, scope.store.bad(txn))
        nodes.touch(txn, grown.leaf, nodes.now())
        if piece.states is not None:
            _put_states(scope, txn, root, piece, piece.states, grown)
        elif piece.more:
            unfinished.note(txn, piece.save.save_id, grown.leaf, 0, this_process())
        return grown

    grown = scope.store.transact(work, keep, durable=durable)
    scope.store.count_evicted(evicted[-1])
    if not piece.more:
        scope.store.saves.end(piece.save, whole=True)
    counters = scope.store.counters
    counters.written_bytes += grown.written_bytes
    counters.healed_blocks += grown.healed_blocks
    return grown


def _make_room(scope: NamespaceScope, txn: Writer, piece: Piece, keep: set[int]) -> Removed:
    """Evict what would lift the store above its limit. Where all of the piece fits in any case, no block is waited for."""
    if scope.store.has_room(txn, piece.most_pages(scope.geometry)):
        return Removed()
    return scope.store.make_room(txn, table.pages_to_put(txn, piece.blocks, scope.geometry), keep)


def _merge(scope: NamespaceScope, txn: Writer, piece: Piece, path: Path, bad: frozenset[bytes]) -> None:
    """Let the block in which the stored prefix ends begin with the stored rows, if it doesn't yet."""
    size = scope.layout.block_tokens
    base, upto = path.matched, len(piece.prompt) // 4
    if base == upto or not base % size or base // size not in piece.rows:
        return
    block = piece.rows[base // size]
    if block.merged == base % size:
        return
    stored = path.partial_block(base, size)
    if stored not in bad:
        merged = merge_stored(scope, txn, block, stored, base % size)
        if merged is not None:
            piece.rows[base // size] = merged


def _begin_or_end(scope: NamespaceScope, txn: Writer, piece: Piece) -> None:
    """Give a save that goes on its number, or take back the note of one that doesn't any more.

    Before blocks are put: the page of the index that this changes then lies in front of them, and they in one run.
    """
    save = piece.save
    if piece.more:
        save.save_id = save.save_id or nodes.new_save_id(txn)
        scope.store.saves.begin(save)
    elif save.save_id:
        unfinished.end(txn, save.save_id)


def _put_states(scope: NamespaceScope, txn: Writer, root: int, piece: Piece, states: StatesPiece, grown: Grown) -> None:
    position, save = len(piece.prompt) // 4, piece.save
    node = checkpoints.place(txn, root, piece.prompt, save.save_id, states.before)
    if node is None:
        return
    if not save.save_id:
        save.save_id = nodes.new_save_id(txn)
    for block in states.blocks:
        written = table.put(txn, block)
        grown.written_bytes += written
        grown.new_blocks += written > 0
    ids = [block.block_id for block in states.blocks]
    node = checkpoints.add_blocks(txn, node, position, save.save_id, states.packed_bytes, ids)
    grown.path.add(node.node)
    if states.last:
        checkpoints.complete(txn, node, position, save.save_id, scope.policy)
    elif not states.before:
        unfinished.note(txn, save.save_id, node.node, position, this_process())


def publish_states(scope: NamespaceScope, prompt: bytes, states: StatesPiece, save: SaveUnderWay) -> Grown:
    """Publish some of a checkpoint's states whose rows are stored. Durable with the last of them.

    Raises as `publish_piece`.
    """
    return publish_piece(scope, Piece(prompt, {}, states, save, more=not states.last), durable=states.last)
