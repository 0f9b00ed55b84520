"""Saving a session: walk, gather, publish, with what follows prepared meanwhile."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from kvstore import blocks as table
from kvstore.arrays import Array, StreamArray
from kvstore.blocks import PreparedBlock
from kvstore.errors import ArrayError, BaseLost, IndexDamaged, KVStoreError
from kvstore.ids import ID_BYTES, TokenArray, token_bytes
from kvstore.radix import checkpoints, walk
from kvstore.records.node import split_ids
from kvstore.records.states import pack_states, packed_states_bytes
from kvstore.saving.ahead import Ahead
from kvstore.saving.check import Comparison, compare_stored
from kvstore.saving.gather import check_states, check_streams, gather_rows, gather_states, release
from kvstore.saving.publish import Piece, StatesPiece, publish_piece, publish_states
from kvstore.scope import NamespaceScope, SaveUnderWay

__all__ = ["SaveResult", "Saver", "group_blocks", "stored_prefix", "touch_stored"]

_log = logging.getLogger("kvstore")

_BASE_LOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save did.

    Attributes
    ----------
    tokens : int
        Length of the session: all of it is stored now.
    stored_tokens : int
        Leading tokens that were stored already; their bytes were not written again.
    new_tokens : int
        Tokens added by this save.
    new_blocks : int
        Blocks written, states included.
    written_bytes : int
        Bytes of block values written (headers and padding included; index records not).
    checkpoint : bool
        Whether states were saved (or found saved) at the session's end.
    checked_blocks : int
        With `check=True`: stored blocks that were compared with the given rows.
    differing_blocks : tuple of int
        First positions of those that differ. The stored ones stay.
    seconds : float
        Wall time.
    """

    tokens: int
    stored_tokens: int
    new_tokens: int
    new_blocks: int
    written_bytes: int
    checkpoint: bool
    checked_blocks: int
    differing_blocks: tuple[int, ...]
    seconds: float


def stored_prefix(scope: NamespaceScope, prompt: bytes) -> int:
    """How many leading tokens have all their rows stored in blocks that nobody refused.

    What a save takes for stored it vouches for, so a block whose reference record is lost is refused here and saved anew.
    """
    size = scope.layout.block_tokens
    with scope.store.environment.reading() as txn:
        path = walk(txn, scope.root(txn), prompt, tolerant=True)
        held = split_ids(path.block_ids(size)[: ID_BYTES * (path.matched // size)])
        if path.matched % size:
            held.append(path.partial_block(path.matched, size))
        for block_id in held:
            if not table.counted(txn, block_id):
                scope.store.refuse(block_id, None)
        return path.sound(path.matched, size, scope.store.bad(txn))


def touch_stored(scope: NamespaceScope, prompt: bytes) -> None:
    """Note that a session was used which is stored already, and see to it that it is so durably.

    Somebody else may have stored it a moment ago, as a step of something longer that is not through.
    """
    scope.store.environment.settle()
    with scope.store.environment.reading() as txn:
        path = walk(txn, scope.root(txn), prompt, tolerant=True)
    if path.nodes:
        scope.store.touch(path.nodes[-1].node)


class Saver:
    """One save of one session. Use once, on one thread.

    Parameters
    ----------
    scope : NamespaceScope
        Where to.
    tokens : uint32 array
        The whole prefix.
    """

    def __init__(self, scope: NamespaceScope, tokens: TokenArray) -> None:
        self._scope = scope
        self._prompt = token_bytes(tokens)
        self._length = tokens.size
        self._size = scope.layout.block_tokens
        with scope.store.environment.reading() as txn:
            blocks = scope.geometry.full_pages
            limits = scope.store.limits(txn, blocks)
        portions = max(limits.piece_pages // limits.portion_pages, 1)
        self._portion_tokens = limits.portion_pages // blocks * self._size
        self._piece_tokens = portions * self._portion_tokens
        self._single_pages = limits.single_pages
        self._piece_pages = limits.piece_pages
        self._new_blocks = self._written = 0

    def save(
        self, arrays: Mapping[str, StreamArray], origin: int, states: Mapping[str, Array] | None, *, check: bool
    ) -> SaveResult:
        """Save what's new of the rows of [origin, length) and, if given, the states at the end.

        Raises
        ------
        ArrayError
            When arrays or states don't fit the layout, or `origin` is no block boundary inside the session.
        BaseLost
            When what is stored ends before `origin`.
        StoreFullError, SpacePinned, DiskError, WriteLockTimeout
            When there is no room, the disk fails, or no lock is to be had. What was published before is a valid, shorter prefix.
        """
        environment = self._scope.store.environment
        environment.retain()  # so that what was published is settled, whoever closes the store meanwhile
        try:
            return self._save(arrays, origin, states, check)
        finally:
            environment.release()

    def _save(self, arrays: Mapping[str, StreamArray], origin: int, states: Mapping[str, Array] | None, check: bool) -> SaveResult:
        started = time.perf_counter()
        scope = self._scope
        self._check_arguments(arrays, origin, states)
        comparison = Comparison()
        stored: int | None = None
        for attempt in range(_BASE_LOST_TRIES):
            try:
                base = stored_prefix(scope, self._prompt)
                stored = base if stored is None else stored
                if check and attempt == 0 and base > origin:
                    comparison = compare_stored(scope, self._prompt, arrays, origin, base)
                self._publish_or_settle(arrays, origin, base, states)
                break
            except (BaseLost, IndexDamaged) as error:
                if attempt == _BASE_LOST_TRIES - 1 or (isinstance(error, BaseLost) and self._reach() < origin):
                    raise
                _log.debug("a save starts over: %s", error)
        assert stored is not None
        counters = scope.store.counters
        counters.saves += 1
        counters.saved_tokens += self._length - stored
        return SaveResult(
            tokens=self._length,
            stored_tokens=stored,
            new_tokens=self._length - stored,
            new_blocks=self._new_blocks,
            written_bytes=self._written,
            checkpoint=states is not None and bool(scope.layout.states),
            checked_blocks=comparison.checked,
            differing_blocks=comparison.differing,
            seconds=time.perf_counter() - started,
        )

    def _reach(self) -> int:
        """The block boundary from which a save has to bring rows now."""
        base = stored_prefix(self._scope, self._prompt)
        return base - base % self._size

    def _check_arguments(self, arrays: Mapping[str, StreamArray], origin: int, states: Mapping[str, Array] | None) -> None:
        if isinstance(origin, bool) or not isinstance(origin, int) or not 0 <= origin <= self._length or origin % self._size:
            raise ArrayError(f"start must be a multiple of block_tokens ({self._size}) from 0 to {self._length}, got {origin!r}")
        check_streams(self._scope, arrays, self._length - origin)
        if states is not None:
            check_states(self._scope, states)

    def _publish_or_settle(
        self, arrays: Mapping[str, StreamArray], origin: int, base: int, states: Mapping[str, Array] | None
    ) -> None:
        """Publish; where that fails half way, what was published before is durable nevertheless."""
        try:
            self._publish(arrays, origin, base, states)
        except BaseException:
            with contextlib.suppress(KVStoreError):  # the disk fails: what has failed already says enough
                self._scope.store.environment.settle()
            raise

    def _publish(self, arrays: Mapping[str, StreamArray], origin: int, base: int, states: Mapping[str, Array] | None) -> None:
        scope, length = self._scope, self._length
        first = base - base % self._size
        wants_states = states is not None and bool(scope.layout.states)
        if wants_states:
            with scope.store.environment.reading() as txn:
                wants_states = not checkpoints.has_checkpoint(txn, scope.root(txn), self._prompt, scope.store.bad(txn))
        if base == length and not wants_states:
            touch_stored(self._scope, self._prompt)
            return
        if first < origin and base < length:
            raise BaseLost(f"{base} tokens of the session are stored, the rows given start at {origin}; give them from {first} on")
        packed = packed_states_bytes(scope.layout, states) if wants_states and states is not None else 0
        if base < length:
            row_pages = -(-(length - first) // self._size) * scope.geometry.full_pages
            state_pages = -(-packed // scope.store.environment.page_bytes)
            if row_pages + state_pages <= self._single_pages:
                self._publish_at_once(arrays, origin, first, states if wants_states else None, packed)
                return
        save = SaveUnderWay()
        try:
            if base < length:
                self._publish_rows(arrays, origin, first, save, more=wants_states)
            if wants_states and states is not None:
                self._publish_states(states, packed, save)
        finally:
            scope.store.give_up(save)

    def _ahead(self, arrays: Mapping[str, StreamArray], origin: int, first: int) -> Ahead:
        scope = self._scope
        prepare = partial(gather_rows, scope, arrays, origin)
        return Ahead(prepare, partial(release, scope), range(first, self._length, self._portion_tokens), self._size)

    def _publish_at_once(
        self, arrays: Mapping[str, StreamArray], origin: int, first: int, states: Mapping[str, Array] | None, packed: int
    ) -> None:
        """Publish all in one transaction, which begins when the first blocks are prepared."""
        with self._ahead(arrays, origin, first) as ahead:
            piece = Piece(self._prompt, ahead.rows(first, self._length))
            try:
                if states is not None:
                    blocks = list(gather_states(self._scope, pack_states(self._scope.layout, states)))
                    piece.states = StatesPiece(blocks, packed, last=True)
                self._count(piece)
            finally:
                piece.release(self._scope)

    def _publish_rows(self, arrays: Mapping[str, StreamArray], origin: int, first: int, save: SaveUnderWay, *, more: bool) -> None:
        """Publish rows in pieces; the next ones are prepared on another thread while one commits.

        Each commit waits for its own pages, and only the last one (unless there is `more`) for the page that makes them count.
        """
        environment, length = self._scope.store.environment, self._length
        room = environment.reservation(-(-(length - first) // self._size) * self._scope.geometry.full_pages)
        with self._ahead(arrays, origin, first) as ahead:
            for start in range(first, length, self._piece_tokens):
                stop = min(start + self._piece_tokens, length)
                piece = Piece(self._prompt[: 4 * stop], ahead.rows(start, stop), save=save, more=more or stop < length)
                try:
                    room.ahead(environment.end_bytes())
                    self._count(piece, durable=not piece.more)
                finally:
                    piece.release(self._scope)

    def _publish_states(self, states: Mapping[str, Array], packed: int, save: SaveUnderWay) -> None:
        scope, before = self._scope, 0
        for group, last in group_blocks(gather_states(scope, pack_states(scope.layout, states)), self._piece_pages, scope):
            try:
                grown = publish_states(scope, self._prompt, StatesPiece(group, packed, last, before), save)
                self._new_blocks += grown.new_blocks
                self._written += grown.written_bytes
                before += len(group)
            finally:
                release(scope, group)

    def _count(self, piece: Piece, *, durable: bool = True) -> None:
        grown = publish_piece(self._scope, piece, durable=durable)
        self._new_blocks += grown.new_blocks
        self._written += grown.written_bytes


def group_blocks(blocks: Iterable[PreparedBlock], pages: int, scope: NamespaceScope) -> Iterator[tuple[list[PreparedBlock], bool]]:
    """Collect blocks into groups of about `pages` pages; says of each whether it is the last."""
    group: list[PreparedBlock] = []
    held = 0
    for block in blocks:
        size = scope.geometry.pages(block.value.nbytes)
        if group and held + size > pages:
            yield group, False
            group, held = [], 0
        group.append(block)
        held += size
    yield group, True
