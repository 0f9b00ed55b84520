"""Capturing: copying what is new out of an engine, piece by piece, into the write-behind queue."""

from __future__ import annotations

from kvstore.errors import ArrayError
from kvstore.ids import TokenArray, token_bytes
from kvstore.radix import checkpoints
from kvstore.records.states import pack_states, packed_states_bytes
from kvstore.saving import (
    Piece,
    StatesPiece,
    check_states,
    check_streams,
    compare_stored,
    gather_rows,
    gather_states,
    group_blocks,
    stored_prefix,
    touch_stored,
)
from kvstore.scope import NamespaceScope
from kvstore.tier.behind import Session, WriteBehind
from kvstore.tier.protocol import Captured, Engine
from kvstore.tier.stats import TierCounters

__all__ = ["Capturer"]


class Capturer:
    """Takes from one engine what its store does not have. One call at a time."""

    def __init__(self, scope: NamespaceScope, engine: Engine, behind: WriteBehind, counters: TierCounters, *, check: bool) -> None:
        self._scope = scope
        self._engine = engine
        self._behind = behind
        self._counters = counters
        self._check = check

    def capture(self, tokens: TokenArray) -> tuple[int, int, str]:
        """Queue what is new of a session; returns tokens stored before, tokens queued, and why not all was queued."""
        scope, size = self._scope, self._scope.layout.block_tokens
        prompt, length = token_bytes(tokens), tokens.size
        base = stored_prefix(scope, prompt)
        if self._behind.under_way(scope, prompt) > base:
            self._behind.await_prefix(scope, prompt, base, scope.store.lock_timeout)
            base = stored_prefix(scope, prompt)
        if self._check and base:
            self._compare(prompt, base)
        if base == length and self._settled(prompt):
            touch_stored(scope, prompt)
            self._counters.add(saved=1)
            return base, 0, ""
        with scope.store.environment.reading() as txn:
            limits = scope.store.limits(txn, scope.geometry.full_pages)
        step = max(limits.piece_pages // scope.geometry.full_pages, 1) * size
        session = Session(scope, prompt, self._counters)
        self._behind.begin(session)
        try:
            first = base - base % size
            captured: Captured | None = None
            if base == length:
                captured = self._states_only(session, first, limits.piece_pages)
            for start in range(first, length, step) if base < length else ():
                stop = min(start + step, length)
                captured = self._ask(start, stop)
                rows = gather_rows(scope, captured.streams, start, start, stop)
                piece = Piece(prompt[: 4 * stop], rows, more=stop < length)
                if not self._put(session, piece, captured if stop == length else None, limits.piece_pages):
                    break
            else:
                if scope.layout.states and captured is not None and not captured.states:
                    session.missed = f"the engine handed out no states at position {length}: the rows alone can't be resumed from"
        except BaseException as error:
            session.abandon(f"{type(error).__name__}: {error}")  # counted by whoever catches it
            raise
        finally:
            self._behind.finish(session)
        return base, length - base if not session.failed else 0, session.failed or session.missed

    def _settled(self, prompt: bytes) -> bool:
        if not self._scope.layout.states:
            return True
        with self._scope.store.environment.reading() as txn:
            return checkpoints.has_checkpoint(txn, self._scope.root(txn), prompt, self._scope.store.bad(txn))

    def _ask(self, start: int, stop: int) -> Captured:
        captured = self._engine.capture(start, stop)
        if not isinstance(captured, Captured):
            raise ArrayError(f"capture must return a Captured, got {type(captured).__name__}")
        check_streams(self._scope, captured.streams, stop - start)
        if captured.states:
            check_states(self._scope, captured.states)
        return captured

    def _put(self, session: Session, piece: Piece, last: Captured | None, pages: int) -> bool:
        """Queue a piece of rows, and with the last one the states: in the same transaction where they are small."""
        if last is None or not last.states:
            return self._behind.put(session, piece, piece.size)
        scope, states = self._scope, last.states
        packed = packed_states_bytes(scope.layout, states)
        room = pages * scope.store.environment.page_bytes - piece.size
        if packed <= room:
            blocks = list(gather_states(scope, pack_states(scope.layout, states)))
            piece.states = StatesPiece(blocks, packed, last=True)
            return self._behind.put(session, piece, piece.size)
        piece.more = True
        return self._behind.put(session, piece, piece.size) and self._put_states(session, last, pages)

    def _put_states(self, session: Session, last: Captured, pages: int) -> bool:
        scope, before = self._scope, 0
        packed = packed_states_bytes(scope.layout, last.states)
        for group, final in group_blocks(gather_states(scope, pack_states(scope.layout, last.states)), pages, scope):
            piece = Piece(session.prompt, {}, StatesPiece(group, packed, final, before), more=not final)
            if not self._behind.put(session, piece, piece.size):
                return False
            before += len(group)
        return True

    def _states_only(self, session: Session, first: int, pages: int) -> Captured:
        """The rows are stored, the states at this position aren't."""
        length = len(session.prompt) // 4
        size = self._scope.layout.block_tokens
        captured = self._ask(min(first, (length - 1) // size * size), length)
        if captured.states:
            self._put_states(session, captured, pages)
        return captured

    def _compare(self, prompt: bytes, base: int) -> None:
        size = self._scope.layout.block_tokens
        step = size * max(1, (8 << 20) // max(self._scope.layout.payload_bytes(size), 1))
        for start in range(0, base, step):
            stop = min(start + step, base)
            captured = self._ask(start, stop)
            comparison = compare_stored(self._scope, prompt, captured.streams, start, stop)
            self._counters.add(shared_blocks_checked=comparison.checked, differing_blocks=len(comparison.differing))
