"""Writing behind: one thread that publishes what cascades have copied, bounded in bytes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvstore.errors import ForkedStoreError, KVStoreError
from kvstore.ids import common_tokens
from kvstore.radix import checkpoints
from kvstore.saving import Piece, publish_piece
from kvstore.scope import NamespaceScope, SaveUnderWay
from kvstore.store.namespace import evict_session
from kvstore.tier.stats import TierCounters

__all__ = ["Session", "WriteBehind"]

_log = logging.getLogger("kvstore")

DEFAULT_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Session:
    """One cascade under way: what its pieces share. When a piece fails, the ones behind it are dropped."""

    scope: NamespaceScope
    prompt: bytes
    counters: TierCounters
    save: SaveUnderWay = field(default_factory=SaveUnderWay)
    failed: str = ""
    left: int = 0
    finished: bool = False
    abandoned: bool = False
    missed: str = ""
    new_tokens: int = 0

    def abandon(self, why: str) -> None:
        """Note that no more pieces will come, and drop those that wait: the cascade has raised and is counted there."""
        self.abandoned = True
        self.failed = self.failed or why


@dataclass(slots=True, eq=False)
class _Job:
    session: Session
    piece: Piece
    size: int = field(default=0)

    def release(self) -> None:
        self.piece.release(self.session.scope)


@dataclass(slots=True, eq=False)
class _Drop:
    """A session to remove once another is stored whole."""

    scope: NamespaceScope
    session: bytes
    follower: bytes
    counters: TierCounters
    size: int = 0

    def run(self) -> None:
        """Remove it. Not worth failing for: what stays goes in its turn."""
        try:
            with self.scope.store.environment.reading() as txn:
                root, bad = self.scope.root(txn), self.scope.store.bad(txn)
                stored = checkpoints.has_checkpoint(txn, root, self.follower, bad)
            if stored and evict_session(self.scope, self.session, durable=False).nodes:
                self.counters.add(dropped_answers=1)
        except Exception as error:
            _log.debug("an answer that was left out of its session's history is kept: %s: %s", type(error).__name__, error)

    def release(self) -> None:
        """Let go of the file."""
        self.scope.store.environment.release()


class WriteBehind:
    """Publishes pieces on a thread of its own, in order. Several tiers of one process may share one. Thread-safe.

    Parameters
    ----------
    max_bytes : int
        How many bytes of copied blocks may wait at once. What exceeds it streams through: the cascade blocks until there is
        room (a piece larger than the bound passes alone).
    when_full : {"block", "drop"}
        With "drop" a cascade that finds no room gives up instead, which is counted as a miss. A crash loses what waits.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_BYTES, when_full: Literal["block", "drop"] = "block") -> None:
        if max_bytes < 1 or when_full not in ("block", "drop"):
            raise ValueError(f"max_bytes must be positive and when_full 'block' or 'drop', got {max_bytes}, {when_full!r}")
        self.max_bytes = max_bytes
        self.when_full = when_full
        self._jobs: deque[_Job | _Drop] = deque()
        self._sessions: list[Session] = []
        self._bytes = 0
        self._queued = self._done = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()
        _live.add(self)

    def begin(self, session: Session) -> None:
        """Announce a cascade, so that others can see what is under way. The store's file stays open until it is through."""
        if self._pid != os.getpid():
            raise ForkedStoreError("this queue was made before the process was forked; make a tier and a queue of its own here")
        session.scope.store.environment.retain()
        with self._changed:
            self._sessions.append(session)

    def put(self, session: Session, piece: Piece, size: int) -> bool:
        """Queue a piece of `size` bytes; it owns its blocks' buffers from here on. False when the session has failed."""
        job = _Job(session, piece, size)
        with self._changed:
            while not session.failed and not self._closed and self._bytes and self._bytes + size > self.max_bytes:
                if self.when_full == "drop":
                    session.failed = f"{self._bytes} bytes wait to be written, the bound is {self.max_bytes}"
                    break
                self._changed.wait()
            if self._closed:
                session.failed = session.failed or "the tier is closed"
            if not session.failed:
                session.failed = self._ensure_thread()
            if session.failed:
                job.release()
                return False
            self._jobs.append(job)
            self._queued += 1
            self._bytes += size
            session.left += 1
            self._changed.notify_all()
        return True

    def drop(self, scope: NamespaceScope, session: bytes, follower: bytes, counters: TierCounters) -> None:
        """Remove a session, as far as no other uses it, after what is queued by now: if `follower` is stored whole then."""
        scope.store.environment.retain()
        job = _Drop(scope, session, follower, counters)
        with self._changed:
            if self._closed or self._ensure_thread():
                job.release()
                return
            self._jobs.append(job)
            self._queued += 1
            self._changed.notify_all()

    def _ensure_thread(self) -> str:
        """Have a thread that publishes; says why not, else nothing. The condition is held."""
        if self._thread is not None and self._thread.is_alive():
            return ""
        thread = threading.Thread(target=self._run, name="kvstore-write-behind", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the interpreter is going down
            return f"no thread to write with: {error}"
        self._thread = thread
        return ""

    def finish(self, session: Session) -> None:
        """Announce that a cascade has queued all its pieces."""
        with self._changed:
            session.finished = True
            half_way = self._settle(session)
        if half_way:
            _take_back(session)

    def under_way(self, scope: NamespaceScope, prompt: bytes) -> int:
        """How many leading tokens of a prompt are on their way into its namespace."""
        with self._changed:
            return self._longest(scope, prompt)

    def _longest(self, scope: NamespaceScope, prompt: bytes) -> int:
        mine = [s for s in self._sessions if s.scope.store is scope.store and s.scope.namespace == scope.namespace]
        return max((common_tokens(session.prompt, prompt) for session in mine), default=0)

    def await_prefix(self, scope: NamespaceScope, prompt: bytes, beyond: int, timeout: float) -> bool:
        """Wait until nothing is under way that shares more than `beyond` tokens with a prompt; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._longest(scope, prompt) <= beyond, timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued by now is published (or has failed); False when `timeout` seconds pass first."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            last = self._queued
            return self._changed.wait_for(lambda: self._done >= last, timeout)

    def close(self) -> None:
        """Flush and end the thread. Idempotent; in a forked child there is nothing to end."""
        if self._pid != os.getpid():
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        _live.discard(self)

    def _settle(self, session: Session) -> bool:
        """Count a cascade once nothing of it is left; says whether to `_take_back` what it has written. The condition is held."""
        if not session.finished or session.left or session not in self._sessions:
            return False
        self._sessions.remove(session)
        half_way = bool(session.failed and session.save.save_id)
        if not half_way:
            session.scope.store.environment.release()
        self._changed.notify_all()
        if session.abandoned:
            session.counters.add(new_tokens=session.new_tokens)
        else:
            session.counters.settle(session.failed or session.missed, session.new_tokens)
            if session.failed or session.missed:
                why = session.failed or session.missed
                _log.warning("a cascade of %d tokens was not saved whole: %s", len(session.prompt) // 4, why)
        return half_way

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            if isinstance(job, _Drop):
                try:
                    job.run()
                    job.release()
                finally:
                    self._did(0)
                continue
            try:
                if not job.session.failed:
                    self._publish(job)
                if job.session.failed:
                    job.session.scope.store.give_up(job.session.save)
                    with contextlib.suppress(
                        KVStoreError
                    ):  # what was published before is a valid, shorter prefix: it may as well stay
                        job.session.scope.store.environment.settle()
            finally:
                job.release()
                with self._changed:
                    self._did(job.size)
                    job.session.left -= 1
                    half_way = self._settle(job.session)
                    self._changed.notify_all()
                if half_way:
                    _take_back(job.session)

    def _did(self, size: int) -> None:
        """Count a job that is through."""
        with self._changed:
            self._bytes -= size
            self._done += 1
            self._changed.notify_all()

    def _publish(self, job: _Job) -> None:
        session = job.session
        started = time.perf_counter()
        try:
            job.piece.save = session.save
            # as of a save: only the last piece waits for the page that makes them all count
            grown = publish_piece(session.scope, job.piece, durable=not job.piece.more)
        except (KVStoreError, OSError, MemoryError) as error:
            session.failed = f"{type(error).__name__}: {error}"
        except Exception as error:  # a bug of ours must not end the thread that others wait for
            session.failed = f"{type(error).__name__}: {error}"
            _log.exception("publishing failed in a way that was not foreseen")
        else:
            session.new_tokens += grown.new_tokens
            session.counters.wrote(grown.written_bytes)
        session.counters.spent(time.perf_counter() - started)


def _take_back(session: Session) -> None:
    """Drop what a cascade that failed has written of its states, unless that was done, and let go of the file."""
    try:
        session.scope.store.give_up(session.save)
    finally:
        session.scope.store.environment.release()


_live: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


def _flush_all() -> None:
    for behind in list(_live):
        behind.flush()


atexit.register(_flush_all)
