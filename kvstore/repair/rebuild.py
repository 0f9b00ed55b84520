"""What can be trusted of a damaged file, written into a new store by the same way that every save takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore import blocks as table
from kvstore.blocks import PreparedBlock
from kvstore.errors import BaseLost, IndexDamaged
from kvstore.radix import CheckpointPolicy
from kvstore.records.block import BlockHeader
from kvstore.records.constants import KIND_STATES
from kvstore.records.node import Checkpoint, Usage, node_key
from kvstore.repair.blocks import BlockReader
from kvstore.repair.records import Space
from kvstore.repair.sessions import Sessions, Step
from kvstore.saving.publish import Piece, StatesPiece, publish_piece
from kvstore.scope import NamespaceScope, SaveUnderWay, StoreScope

__all__ = ["Kept", "Rebuild", "Trial", "keep_all"]

_TREES_GROW_BY = 12  # pages that making room sets aside for the trees: up to here a save evicts nothing
_TRIAL_PIECE = 8 << 20

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Kept:
    """What was kept, in numbers."""

    nodes: int = 0
    sessions: int = 0
    tokens: int = 0
    checkpoints: int = 0
    lost_checkpoints: int = 0


class Trial:
    """Only looks at what could be kept: for a dry run."""

    def value_bytes(self, space: Space, header: BlockHeader) -> int:
        """How long the value of a block has to be."""
        return header.padded_bytes + header.payload_bytes

    def piece_bytes(self, space: Space) -> int:
        """How many bytes of payload are to be handed over at once."""
        return _TRIAL_PIECE

    def rows(self, step: Step, stop: int, first: int, blocks: list[PreparedBlock]) -> bool:
        """Take blocks of a step, from block `first` up to position `stop`; whether there was room for them."""
        return True

    def states(self, step: Step, checkpoint: Checkpoint, blocks: list[PreparedBlock]) -> bool:
        """Take a checkpoint's states."""
        return True

    def use(self, step: Step, usage: Usage) -> None:
        """Remember when a step's node was last used."""


# What the namespace's own policy kept is all that is found; which one that was, the file doesn't say.
_KEEP_ALL = CheckpointPolicy(per_path=1 << 30)


@dataclass(slots=True)
class Rebuild(Trial):
    """Writes what is handed over into a new store, which nobody else has open."""

    store: StoreScope
    _scopes: dict[bytes, NamespaceScope] = field(default_factory=dict)
    _uses: dict[int, Usage] = field(default_factory=dict)
    _leaf: int = 0
    _path: frozenset[int] = frozenset()

    def scope(self, space: Space) -> NamespaceScope:
        """A namespace of the new store."""
        known = self._scopes.get(space.namespace)
        if known is None:
            known = NamespaceScope.of_digest(self.store, space.layout, space.salt, _KEEP_ALL)
            self._scopes[space.namespace] = known
        return known

    def value_bytes(self, space: Space, header: BlockHeader) -> int:
        """See `Trial.value_bytes`."""
        scope = self.scope(space)
        geometry = scope.states_geometry if header.kind == KIND_STATES else scope.geometry
        return geometry.value_bytes(header.padded_bytes, header.payload_bytes)

    def piece_bytes(self, space: Space) -> int:
        """See `Trial.piece_bytes`."""
        with self.store.environment.reading() as txn:
            pages = self.store.limits(txn, self.scope(space).geometry.full_pages).piece_pages
        return pages * self.store.environment.page_bytes

    def rows(self, step: Step, stop: int, first: int, blocks: list[PreparedBlock]) -> bool:
        """See `Trial.rows`."""
        rows = {first + index: block for index, block in enumerate(blocks)}
        return self._publish(step.space, Piece(step.prompt(stop), rows))

    def states(self, step: Step, checkpoint: Checkpoint, blocks: list[PreparedBlock]) -> bool:
        """See `Trial.states`."""
        scope, before, save = self.scope(step.space), 0, SaveUnderWay()
        size = max(self.piece_bytes(step.space) // scope.chunk_bytes, 1)
        try:
            for start in range(0, len(blocks), size):
                group, last = blocks[start : start + size], start + size >= len(blocks)
                states = StatesPiece(group, checkpoint.packed_bytes, last, before)
                if not self._publish(step.space, Piece(step.prompt(checkpoint.position), {}, states, save, more=not last)):
                    return False
                before += len(group)
            return True
        finally:
            self.store.give_up(save)

    def _publish(self, space: Space, piece: Piece) -> bool:
        """Publish a piece if there is room without evicting anything: what was kept before is worth more."""
        scope = self.scope(space)
        with self.store.environment.reading() as txn:
            limit = self.store.limits(txn, *scope.block_sizes).live_pages
            room = txn.live_pages() + table.pages_to_put(txn, piece.blocks, scope.geometry) + _TREES_GROW_BY <= limit
        if not room:
            return False
        try:
            grown = publish_piece(scope, piece, durable=False)
        except (BaseLost, IndexDamaged):
            return False
        self._leaf, self._path = grown.leaf, frozenset(grown.path)
        return True

    def use(self, step: Step, usage: Usage) -> None:
        """See `Trial.use`."""
        for node in self._path:
            self._uses.setdefault(node, usage)
        self._uses[self._leaf] = usage

    def write_uses(self) -> None:
        """Write down when each node was last used: as it was before the damage, and not that it was just repaired."""
        with self.store.environment.write(self.store.lock_timeout) as txn:
            for node, usage in self._uses.items():
                if txn.get(node_key(node), txn.db.nodes) is not None:
                    txn.put(txn.db.usage, node_key(node), usage.encode(node))


def keep_all(sessions: Sessions, reader: BlockReader, target: Trial, progress: Progress | None) -> Kept:
    """Keep every session as far as it is whole, those used last first; then the states, the deepest first.

    In that order no checkpoint that was there is dropped for another one: the one saved last, which may be a shallow one, is
    the last again.
    """
    kept = Kept()
    reached: dict[int, int] = {}  # how far each node was kept
    states: list[tuple[int, int]] = []
    for count, leaf in enumerate(sessions.leaves):
        if progress is not None:
            progress("sessions", count, len(sessions.leaves))
        whole = True
        for step in sessions.path(leaf):
            if step.node.node not in reached:
                reached[step.node.node] = _keep(step, reader, target)
                kept.tokens += reached[step.node.node] - step.node.start
                kept.nodes += reached[step.node.node] == step.node.end
                states += [(c.position, leaf) for c in step.node.checkpoints if c.complete]
                if reached[step.node.node] > step.node.start:
                    target.use(step, sessions.records.usage.get(step.node.node, Usage(0, 0)))
            whole = reached[step.node.node] == step.node.end
            if not whole:
                break
        kept.sessions += whole and leaf in reached
    for count, (position, leaf) in enumerate(sorted(states, reverse=True)):
        if progress is not None:
            progress("checkpoints", count, len(states))
        done = _keep_states(sessions, leaf, position, reached, reader, target)
        kept.checkpoints += done
        kept.lost_checkpoints += not done
    return kept


def _keep(step: Step, reader: BlockReader, target: Trial) -> int:
    """Keep a node's rows; returns the position up to which that was possible."""
    size, reached = step.space.layout.block_tokens, step.node.start
    for first, wanted in _groups(step, target.piece_bytes(step.space)):
        stop = min((first + len(wanted)) * size, step.node.end)
        blocks = reader.rows(step.space, wanted)
        try:
            if len(blocks) < len(wanted):
                stop = (first + len(blocks)) * size
            if stop > reached and target.rows(step, stop, first, blocks):
                reached = stop
            else:
                return reached
        finally:
            for block in blocks:
                reader.pool.give(block.value)
        if len(blocks) < len(wanted):
            return reached
    return reached


def _groups(step: Step, piece_bytes: int) -> Iterator[tuple[int, list[tuple[bytes, int]]]]:
    """A node's blocks in groups of about so many bytes, each with the index of its first block."""
    layout, wanted = step.space.layout, step.blocks()
    most = max(piece_bytes // max(layout.payload_bytes(layout.block_tokens), 1), 1)
    for at in range(0, len(wanted), most):
        yield step.first_block + at, wanted[at : at + most]


def _keep_states(sessions: Sessions, leaf: int, position: int, reached: dict[int, int], reader: BlockReader, target: Trial) -> bool:
    for step in sessions.path(leaf):
        for checkpoint in step.node.checkpoints:
            if checkpoint.position != position or not checkpoint.complete:
                continue
            if reached.get(step.node.node, 0) < position:
                return False
            blocks = reader.states(step.space, checkpoint.ids)
            try:
                whole = len(blocks) == len(checkpoint.ids) and bool(blocks)
                whole = whole and sum(block.header.payload_bytes for block in blocks) == checkpoint.packed_bytes
                return whole and target.states(step, checkpoint, blocks)
            finally:
                for block in blocks:
                    reader.pool.give(block.value)
    return False
