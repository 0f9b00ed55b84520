"""A session's tier: promote when a request starts, cascade when it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvstore.errors import (
    ArrayError,
    BlockDamaged,
    EngineError,
    ForkedStoreError,
    KVStoreError,
    LayoutError,
    StoreClosedError,
)
from kvstore.ids import TokenArray, Tokens, as_tokens, token_bytes
from kvstore.leases import open_lease
from kvstore.radix import CheckpointPolicy
from kvstore.saving import stored_prefix
from kvstore.store import Namespace, Store
from kvstore.tier.answers import Answers
from kvstore.tier.behind import WriteBehind
from kvstore.tier.capture import Capturer
from kvstore.tier.handed import Handed
from kvstore.tier.placement import find_pauses
from kvstore.tier.protocol import Engine
from kvstore.tier.stats import TierCounters, TierStats

__all__ = ["CascadeResult", "SessionTier"]

_log = logging.getLogger("kvstore")

# what the caller did wrong, as opposed to what the environment did: it raises even from promote and cascade
_MISUSE = (ArrayError, LayoutError, EngineError, StoreClosedError, ForkedStoreError)


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """What a cascade has taken from the engine. The writing goes on behind it.

    Attributes
    ----------
    tokens : int
        Length of the session.
    stored_tokens : int
        Leading tokens that were stored already.
    captured_tokens : int
        Tokens whose rows were copied and queued.
    missed : str
        Why nothing or not everything was queued, or empty.
    """

    tokens: int
    stored_tokens: int
    captured_tokens: int
    missed: str


class SessionTier:
    """One engine (one sequence) over a store. Its methods are called one at a time; many tiers share a store.

    Parameters
    ----------
    store : Store
        Stays the caller's; close the tier first.
    engine : Engine
        The sequence. Its `layout()` is asked for once, here.
    salt : bytes
        Anything beside the layout that changes the state: a tenant, a LoRA, a control vector.
    check : bool
        At each cascade, compare what is stored already with what the engine holds and count the blocks that differ. Costs a
        pass over the whole session.
    write_behind : WriteBehind, optional
        Where cascades queue what they have copied. Several tiers may share one; by default the tier has its own.
    checkpoints : CheckpointPolicy, optional
        Where states are worth saving, and which are kept; see `Store.namespace`.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        salt: bytes = b"",
        check: bool = False,
        write_behind: WriteBehind | None = None,
        checkpoints: CheckpointPolicy | None = None,
    ) -> None:
        self._engine = engine
        self._namespace: Namespace = store.namespace(engine.layout(), salt=salt, checkpoints=checkpoints)
        self._counters = TierCounters()
        self._owns = write_behind is None
        self._behind = write_behind if write_behind is not None else WriteBehind()
        self._capturer = Capturer(self._namespace.scope, engine, self._behind, self._counters, check=check)
        self._answers = Answers()
        self._closed = False

    def __enter__(self) -> SessionTier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        """Where the tier's sessions are stored."""
        return self._namespace

    @property
    def checkpoints(self) -> CheckpointPolicy:
        """Where states are saved, and which are kept."""
        return self._namespace.scope.policy

    @property
    def stats(self) -> TierStats:
        """What the tier has done so far."""
        return self._counters.stats

    def promote(self, tokens: Tokens, *, limit: int | None = None) -> int:
        """Restore the longest stored prefix of a prompt into the engine, or start clean. Never in between.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            The prompt.
        limit : int, optional
            The most that may be restored, for an engine that needs more left to compute than the last token.

        Returns
        -------
        int
            How many tokens the engine stands at: at most len(tokens) - 1, so that something is left to compute. After 0 the
            engine has been reset. Every byte that was applied has been checked.

        Raises
        ------
        TokensError, ArrayError, EngineError, StoreClosedError
            Misuse: by the caller, or by the engine; the engine has been reset. Faults of the environment don't raise: they
            are logged and counted, and the engine starts clean.
        """
        self._check_open()
        prompt = as_tokens(tokens)
        if self._drops_answers:
            self._answers.asked(token_bytes(prompt), self._namespace.scope.policy.boundary)
        most = prompt.size - 1 if limit is None else min(max(limit, 0), prompt.size - 1)
        started = time.perf_counter()
        try:
            reused = self._restore(prompt, most)
        except _MISUSE:
            self._engine.reset()
            raise
        except (KVStoreError, OSError, MemoryError) as error:
            _log.warning("a promote of %d tokens starts clean: %s: %s", prompt.size, type(error).__name__, error)
            self._counters.add(faults=1)
            reused = 0
        except BaseException:  # an interrupt in the middle of `apply`, say
            self._engine.reset()
            raise
        if not reused:
            self._engine.reset()
        seconds = time.perf_counter() - started if reused else 0.0
        self._counters.add(
            promotes=1,
            promoted=int(reused > 0),
            promote_misses=int(not reused),
            reused_tokens=reused,
            fresh_tokens=prompt.size - reused,
            restore_seconds=seconds,
        )
        return reused

    def _restore(self, prompt: TokenArray, limit: int) -> int:
        scope = self._namespace.scope
        self._await_rows(token_bytes(prompt))
        shorter = prompt.size
        while True:
            with open_lease(scope, prompt, limit) as lease:
                if not lease:
                    return 0
                if lease.length >= shorter:
                    raise KVStoreError(f"damage was met and the same {lease.length} tokens are offered again")
                shorter = lease.length
                handed = Handed(lease, self._namespace.layout)
                try:
                    self._engine.apply(handed)
                    handed.check_taken()
                    return lease.length
                except BlockDamaged as error:
                    _log.warning("a promote refuses damaged bytes and falls back: %s", error)
                    self._counters.add(fallbacks=1)
                    self._engine.reset()  # before the next try: never apply on top of a mixture
                except (KVStoreError, OSError, MemoryError):
                    raise
                except Exception as error:
                    _log.warning("the engine failed to take a prefix of %d tokens: %r", lease.length, error)
                    self._counters.add(faults=1)
                    return 0

    def _await_rows(self, prompt: bytes) -> None:
        """Let rows arrive that are still on their way into the store: waiting for them costs less than computing them."""
        scope = self._namespace.scope
        if self._behind.under_way(scope, prompt):
            stored = stored_prefix(scope, prompt)
            self._behind.await_prefix(scope, prompt, stored, scope.store.lock_timeout)

    def cascade(self, tokens: Tokens) -> CascadeResult:
        """Save what is new of a session, without waiting for the disk.

        Copies from the engine what it needs before it returns; the writing is done behind, in order, and bounded in bytes. Only
        where an earlier cascade of the same session is still being written does it wait for that, to add to it what is new.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            Every position that the engine has computed, in order: it stands at len(tokens). Call it at the turn's boundary
            (before decoding on), since that is what a client that hides reasoning comes back to, and when the answer is done.
            `pauses` says where else, and `prefill` does it.

        Raises
        ------
        TokensError, ArrayError, StoreClosedError
            Misuse. Faults of the environment don't raise: they are logged and counted.
        """
        self._check_open()
        prompt = as_tokens(tokens)
        started = time.perf_counter()
        self._counters.add(cascades=1)
        try:
            stored, captured, missed = self._capturer.capture(prompt)
        except _MISUSE:
            raise
        except Exception as error:
            stored, captured, missed = 0, 0, f"{type(error).__name__}: {error}"
            _log.warning("a cascade of %d tokens is a miss: %s", prompt.size, missed)
            self._counters.add(faults=1, save_misses=1)
        else:
            if self._drops_answers and not missed:
                for answer in self._answers.cascaded(token_bytes(prompt)):
                    self._behind.drop(self._namespace.scope, answer, token_bytes(prompt), self._counters)
        self._counters.add(capture_seconds=time.perf_counter() - started)
        return CascadeResult(prompt.size, stored, captured, missed)

    @property
    def _drops_answers(self) -> bool:
        """Whether answers that a client leaves out of its history go: where they cost states, unless the policy keeps them."""
        scope = self._namespace.scope
        return bool(scope.layout.states) and scope.policy.drop_answers

    def pauses(self, tokens: Tokens, reused: int) -> tuple[int, ...]:
        """Say where to stop for a cascade while a prompt is computed.

        States are valid at one position only, so somebody has to stop there. By the policy in `checkpoints` that is the turn's
        boundary, each multiple of `every`, and where the prompt leaves what another session has stored. For a layout without
        states it is the prompt's end alone. `prefill` does it all.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            The prompt.
        reused : int
            Where the engine stands: what `promote` returned.

        Returns
        -------
        tuple of int
            Positions p behind `reused`, ascending: compute up to p, then call `cascade(tokens[:p])`. Empty when there is nothing to
            save before the answer. A fault of the environment leaves out the branch, and is logged.
        """
        self._check_open()
        return self._pauses(as_tokens(tokens), reused)

    def _pauses(self, prompt: TokenArray, reused: int) -> tuple[int, ...]:
        scope = self._namespace.scope
        try:
            return find_pauses(scope, token_bytes(prompt), reused, index=True)
        except (KVStoreError, OSError, MemoryError) as error:
            _log.warning("the index was not looked at for a place to save at: %s: %s", type(error).__name__, error)
            self._counters.add(faults=1)
            return find_pauses(scope, token_bytes(prompt), reused, index=False)

    def prefill(self, tokens: Tokens, compute: Callable[[int, int], object], *, limit: int | None = None) -> int:
        """Promote, let the engine compute the rest, and cascade wherever that is worth it on the way.

        What is left to the caller is one cascade when the answer is done.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            The prompt.
        compute : callable
            Called as `compute(start, stop)`, in order, until the engine stands at len(tokens): evaluate the positions
            [start, stop), at whose start the engine stands. What it raises is passed on.
        limit : int, optional
            As for `promote`.

        Returns
        -------
        int
            How many tokens were reused.
        """
        prompt = as_tokens(tokens)
        reused = at = self.promote(prompt, limit=limit)
        for pause in self._pauses(prompt, reused):
            compute(at, pause)
            self.cascade(prompt[:pause])
            at = pause
        if at < prompt.size:
            compute(at, prompt.size)
        return reused

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was cascaded is stored (or has failed, which is counted); False when `timeout` seconds pass."""
        return self._behind.flush(timeout)

    def close(self) -> None:
        """Flush and end. Idempotent. Also done at interpreter exit, for what is still queued then."""
        if not self._closed:
            self._closed = True
            self._behind.flush()
            if self._owns:
                self._behind.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this tier is closed; make a new one")
        self._namespace.scope.store.environment.check_open()
