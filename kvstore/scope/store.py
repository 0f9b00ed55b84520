"""What the handles of one open store share in a process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import blocks as table
from kvstore.env import Environment, MapFull, Reader, Writer
from kvstore.errors import KVStoreError, SpacePinned, StoreFullError
from kvstore.eviction import (
    Candidate,
    LeastRecentlyUsed,
    Limits,
    Policy,
    RankingUsedUp,
    Stateful,
    Victims,
    evict_to,
    free_some,
    has_room,
    make_room,
)
from kvstore.radix import CheckpointPolicy, Removed, Swept, find_disagreements, nodes, set_right, sweep, unfinished
from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN
from kvstore.records.meta import SWEEP_KEY
from kvstore.records.node import node_key
from kvstore.scope.roots import NO_ROOTS, PolicyOfRoot, Roots
from kvstore.scope.saves import SavesUnderWay, SaveUnderWay
from kvstore.staging import BufferPool

__all__ = ["StoreCounters", "StoreScope"]

_log = logging.getLogger("kvstore")
_T = TypeVar("_T")

_MAP_FULL_TRIES = 5
_POINTS_A_TRY = 1  # twice as many with each further try
_PASSING_READER = 0.5  # seconds
_READER_WAITS = 3
_TOUCHES_HELD = 4096
_POLICIES_HELD = 4096
_TOUCHES_AT_ONCE = 512  # 10 ms
_TOUCHES_LOST = 30.0  # seconds: what is older than that was written, also by a process that only reads
_BLOCKS_REMEMBERED = 1 << 16
_SAVE_GETS_ON = 10.0  # seconds within which a save that isn't stopped comes to its next transaction
_GIVE_UP_TIMEOUT = 1.0  # seconds
_SWEEP_TRIES = 3
_SWEEP_SHARE = 20  # of the time, at most, is spent on setting the index right


@dataclass(slots=True)
class StoreCounters:
    """What happened through this process's handles of a store since it was opened."""

    saves: int = 0
    saved_tokens: int = 0
    written_bytes: int = 0
    leases: int = 0
    overdue_leases: int = 0
    restored_bytes: int = 0
    damaged_blocks: int = 0
    healed_blocks: int = 0
    evicted_nodes: int = 0
    evicted_tokens: int = 0
    refused_saves: int = 0
    stuck_blocks: int = 0  # that could not be freed, since their first page can't be read


class Overdue(Protocol):
    """Something that is reported when it lives too long."""

    def report_if_overdue(self) -> None:
        """Log and count it, once, if it is older than its limit."""


@dataclass
class StoreScope:
    """Shared by all handles of one store in a process. Thread-safe.

    Attributes
    ----------
    environment : Environment
        The open file.
    lock_timeout : float
        Seconds that a write waits for other writers: that of the first handle.
    """

    environment: Environment
    lock_timeout: float
    policy: Policy = field(default_factory=LeastRecentlyUsed)
    counters: StoreCounters = field(default_factory=StoreCounters)
    saves: SavesUnderWay = field(default_factory=SavesUnderWay)
    pool: BufferPool = field(default_factory=lambda: BufferPool(48 << 20, align=PAYLOAD_ALIGN, skew=PAGE_HEADER))

    def __post_init__(self) -> None:
        self._touches: dict[int, int] = {}
        # blocks that failed their checks in this process and are not marked in the file yet, with the offset they were read at
        self._damaged: dict[bytes, int | None] = {}
        self._read_past_cache: dict[bytes, None] = {}
        self._guard = threading.Lock()
        self._victims = Victims(self.policy)
        self._policies: dict[bytes, CheckpointPolicy] = {}
        self._roots = NO_ROOTS
        self._pins: dict[int, Overdue] = {}
        self._sweep_after = float("-inf")
        self._touches_due = time.monotonic() + _TOUCHES_LOST

    @property
    def pending(self) -> bool:
        """Whether there are touches or marks that no transaction has written yet, or states of failed saves to drop."""
        return bool(self._touches or self._damaged or self.saves.left)

    def touch(self, node: int) -> None:
        """Remember that a node was used; written with the next transaction, so that a hit costs no durable write."""
        with self._guard:
            self._touches.pop(node, None)  # so that they are in order of use
            self._touches[node] = nodes.now()
            while len(self._touches) > _TOUCHES_HELD:
                del self._touches[next(iter(self._touches))]

    def past_cache(self, block_ids: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """Whether each block, where the page cache doesn't have it, is to be read past it: so the first time, and not again.

        What comes back a second time is worth the memory; what comes once would push out what is. Remembered by this
        process, for the last 65,536 blocks.
        """
        with self._guard:
            return np.array([block_id not in self._read_past_cache for block_id in block_ids], np.uint8)

    def was_read_past_cache(self, block_ids: Iterable[bytes]) -> None:
        """Remember blocks that were read past the page cache."""
        with self._guard:
            for block_id in block_ids:
                self._read_past_cache[block_id] = None
            while len(self._read_past_cache) > _BLOCKS_REMEMBERED:
                del self._read_past_cache[next(iter(self._read_past_cache))]

    def watch(self, pin: Overdue) -> None:
        """Report a lease's pin, once, if it lives too long. Looked at with each write, since writes are what it hinders."""
        self._pins[id(pin)] = pin

    def unwatch(self, pin: Overdue) -> None:
        """End that: the pin's last holder has gone."""
        self._pins.pop(id(pin), None)

    def refuse(self, block_id: bytes, offset: int | None) -> None:
        """Refuse a block from now on: it failed its checks. Marked in the file by the next transaction.

        Parameters
        ----------
        offset : int or None
            Where its payload was looked for; None if the store didn't know. Once the block lies elsewhere somebody has healed it,
            and what was seen at the old place says nothing.
        """
        with self._guard:
            if self._damaged.get(block_id, -1) != offset:
                self._damaged[block_id] = offset
                self.counters.damaged_blocks += 1

    def bad(self, txn: Reader | Writer) -> frozenset[bytes]:
        """All blocks to refuse: marked in the file, or found damaged by this process."""
        marked = table.bad_blocks(txn)
        if not self._damaged:
            return marked
        with self._guard:
            seen = dict(self._damaged)
        return marked | {block_id for block_id, offset in seen.items() if table.offset_of(txn, block_id) == offset}

    def mark_damaged(self, txn: Writer) -> dict[bytes, int | None]:
        """Write down which blocks this process has refused, in a transaction; returns those that were looked at."""
        with self._guard:
            seen = dict(self._damaged)
        for block_id, offset in seen.items():
            if table.offset_of(txn, block_id) == offset:
                table.mark_bad(txn, block_id)
        return seen

    def limits(self, txn: Reader | Writer, *block_pages: int) -> Limits:
        """How full the file may be, given the size classes of the namespaces it holds.

        A namespace that is about to save gives its own `block_pages`: with its first save it is not among them yet.
        """
        sizes = self._known(txn).sizes.union(block_pages)
        return Limits(self.environment.map_pages, max(sizes, default=1), len(sizes) > 1)

    def stateful(self, txn: Reader | Writer) -> Stateful:
        """Roots of the namespaces whose layout has states, with the policy of those that this process has a handle on."""
        return PolicyOfRoot(self._known(txn).stateful, self._policies)

    def policy_of(self, namespace: bytes, given: CheckpointPolicy | None) -> CheckpointPolicy:
        """The policy of a new handle on a namespace: what it is given, else that of the latest handle, else the default.

        Remembered for the last 4,096 namespaces.
        """
        with self._guard:
            latest = self._policies.pop(namespace, None)
            policy = self._policies[namespace] = given or latest or CheckpointPolicy()
            while len(self._policies) > _POLICIES_HELD:
                del self._policies[next(iter(self._policies))]
        return policy

    def _known(self, txn: Reader | Writer) -> Roots:
        version = Roots.version_in(txn)
        if self._roots.version != version:
            self._roots = Roots.read(txn, version)
        return self._roots

    def has_room(self, txn: Writer, pages: int) -> bool:
        """Whether so many more pages fit without evicting anything."""
        return has_room(txn, self.limits(txn), pages)

    def make_room(self, txn: Writer, pages: int, keep: set[int]) -> Removed:
        """Evict, inside a transaction, what would lift the store above its limit; to be counted once it is committed.

        Raises StoreFullError.
        """
        try:
            return make_room(txn, self._victims, self.limits(txn), pages, self._kept(txn, keep), self.stateful(txn))
        except MapFull:
            raise  # not refused yet: it is tried again
        except StoreFullError:
            self.counters.refused_saves += 1
            raise

    def _kept(self, txn: Reader | Writer, keep: set[int] | None) -> frozenset[int]:
        """What is not evicted for a save: its own path, and that of any other that has got on a short while ago."""
        since = nodes.now() - round(_SAVE_GETS_ON * 1e6)
        return frozenset(unfinished.held(txn, self.saves.runs, since).union(keep or ()))

    def count_evicted(self, removed: Removed) -> None:
        """Count what a transaction that was committed has evicted."""
        self.counters.evicted_nodes += removed.nodes
        self.counters.evicted_tokens += removed.tokens

    def transact(self, work: Callable[[Writer], _T], keep: set[int] | None = None, *, durable: bool = True) -> _T:
        """Run `work` in a write transaction, with pending marks and touches; try again where LMDB found no contiguous pages.

        `work` may be called several times, each time in a fresh transaction that sees nothing of the earlier tries. What
        `durable` means is said at `Environment.write`.

        Raises
        ------
        SpacePinned
            When an open reader pins the pages that were freed. Nothing is evicted for it.
        StoreFullError, WriteLockTimeout, StoreDamagedError
        """
        evictions = waits = 0
        ranking: Sequence[Candidate] | None = None
        while True:
            try:
                return self._transact(work, self.lock_timeout, durable, ranking)
            except RankingUsedUp:
                ranking = self._rank()
            except MapFull as error:
                ranking = None
                if not self.environment.readers.await_passed(0):
                    # a reader that is only passing (a promote takes milliseconds) is waited for; what it pinned can be used then
                    if not self.environment.readers.await_passed(_PASSING_READER):
                        self.counters.refused_saves += 1
                        raise SpacePinned(
                            f"freed pages are pinned by an open lease or reader, nothing was evicted for it ({error}); "
                            "end the lease, the space comes back by itself"
                        ) from error
                    waits += 1
                    if waits <= _READER_WAITS:
                        continue
                    # where there is always one passing, it isn't they
                if evictions == _MAP_FULL_TRIES:
                    self.counters.refused_saves += 1
                    raise StoreFullError(f"no contiguous free pages after {evictions} tries; raise the cap ({error})") from error
                self._free_some(_POINTS_A_TRY << evictions, keep)
                evictions += 1

    def _rank(self) -> Sequence[Candidate]:
        with self.environment.reading() as txn:
            return self._victims.rank(txn)

    def _free_some(self, points: int, keep: set[int] | None) -> None:
        try:
            with self.environment.reading() as reader:
                stateful = self.stateful(reader)
                kept = self._kept(reader, keep)
                dead = not all(r is not None and self.saves.runs(r) for _, r in unfinished.noted(reader))
            if dead:  # what dead savers have left was dropped in the transaction that failed, and is there again
                self._transact(lambda _: None, self.lock_timeout, durable=False)
            removed = free_some(self.environment, self._victims, points, self.lock_timeout, kept, stateful)
        except MapFull as error:
            raise StoreFullError(f"the store has no page left even to evict with; raise the cap ({error})") from error
        self.count_evicted(removed)

    def _transact(
        self,
        work: Callable[[Writer], _T],
        timeout: float,
        durable: bool = True,
        ranking: Sequence[Candidate] | None = None,
        sweeps: bool = True,
    ) -> _T:
        self.environment.retain()  # until the last thing is done that looks at the file
        try:
            result, owed = self._transact_retained(work, timeout, durable, ranking)
            if owed and sweeps and time.monotonic() > self._sweep_after:
                self._sweep(timeout)
            return result
        finally:
            self.environment.release()

    def _transact_retained(
        self, work: Callable[[Writer], _T], timeout: float, durable: bool, ranking: Sequence[Candidate] | None
    ) -> tuple[_T, bool]:
        with self._guard:
            touches = dict(islice(self._touches.items(), _TOUCHES_AT_ONCE))
        self.environment.readers.clear_due()
        for pin in list(self._pins.values()):
            pin.report_if_overdue()
        began = False
        left = self.saves.left
        try:
            with self.environment.write(timeout, durable=durable) as txn:
                began = True
                self._victims.begin(ranking)
                cleared = unfinished.clear(txn, self.saves.runs)
                marks = self.mark_damaged(txn)
                for node, last_use in touches.items():
                    if txn.get(node_key(node), txn.db.usage) is not None:
                        nodes.touch(txn, node, last_use)
                result = work(txn)
                owed = txn.damage or txn.get(SWEEP_KEY, txn.db.meta) is not None
        except BaseException:
            if began:
                self._victims.forget()  # what was taken from the ranking is still there
                self._roots = NO_ROOTS  # a root seen in it may never have been, and its number may be another's
            raise
        self.counters.stuck_blocks += len(txn.stuck)
        if cleared:
            self.saves.cleared(left)
        with self._guard:
            for block_id, offset in marks.items():
                if self._damaged.get(block_id, -1) == offset:
                    del self._damaged[block_id]
            for node, last_use in touches.items():
                if self._touches.get(node) == last_use:
                    del self._touches[node]
        return result, owed

    def _sweep(self, timeout: float) -> None:
        """Set the index right that was found damaged. Not worth failing for: what is owed stays noted in the store."""
        began = time.monotonic()
        try:
            swept = self._swept(timeout)
        except Exception as error:
            _log.warning("the index was not set right after damage: %s: %s", type(error).__name__, error)
        else:
            _log.warning("the index was set right after damage: %d records, %d counts", swept.records, swept.counts)
        # damage that comes back again and again must not keep everybody from writing
        self._sweep_after = time.monotonic() + _SWEEP_SHARE * (time.monotonic() - began)

    def _swept(self, timeout: float) -> Swept:
        """Sweep. What is wrong is looked for while nobody waits, and holds if nobody has written meanwhile; else once more."""
        for _ in range(_SWEEP_TRIES):
            with self.environment.reading() as reader:
                findings = find_disagreements(reader)
                seen = reader.transaction
            with self.environment.write(timeout) as txn:
                swept = set_right(txn, findings) if txn.transaction == seen + 1 else None
            if swept is not None:
                break
        else:
            with self.environment.write(timeout) as txn:
                swept = sweep(txn)
        self.counters.stuck_blocks += len(txn.stuck)
        return swept

    def give_up(self, save: SaveUnderWay) -> None:
        """End a save. What it has written of states that aren't whole goes: now if the lock is to be had, else with the next write.

        Does nothing for one that was completed, or has ended before.
        """
        if not self.saves.end(save, whole=False):
            return
        try:
            self._transact(lambda _: None, min(_GIVE_UP_TIMEOUT, self.lock_timeout), durable=False)
        except Exception as error:  # the save has failed already, and says why
            _log.debug("what a failed save has left goes with the next write: %s", error)

    def evict_down(self, live_pages: int) -> Removed:
        """Evict until at most `live_pages` pages are live, or nothing is left that may go. Several transactions."""
        removed = Removed()

        def work(txn: Writer) -> tuple[Removed, bool]:
            part = evict_to(txn, self._victims, live_pages, self._kept(txn, None), self.stateful(txn))
            return part, bool(part.nodes) and txn.live_pages() > live_pages

        self._victims.forget()  # others have used theirs since they were ranked
        more = True
        while more:
            part, more = self.transact(work)
            removed.add(part)
        self.count_evicted(removed)
        return removed

    def write_pending(self, timeout: float) -> None:
        """Write marks and touches that no save has carried, if the lock is to be had; recency is not worth waiting for."""
        try:
            for _ in range(_TOUCHES_HELD // _TOUCHES_AT_ONCE):
                if self.pending:
                    self._transact(lambda _: None, timeout)
        except KVStoreError as error:
            _log.debug("recency of %d nodes was not written: %s", len(self._touches), error)

    def write_old_touches(self) -> None:
        """Write touches that no save has carried for a while, so that a process that only reads keeps alive what it reads.

        Now and then, not durably, and only where nobody else is writing: a hit costs no write of its own.
        """
        if not self._touches or time.monotonic() < self._touches_due:
            return
        self._touches_due = time.monotonic() + _TOUCHES_LOST
        try:
            self._transact(lambda _: None, 0.0, durable=False, sweeps=False)
        except (KVStoreError, OSError) as error:
            _log.debug("recency of %d nodes was not written: %s", len(self._touches), error)
