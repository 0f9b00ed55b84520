"""What the handles of one open store share in a process, and what the calls on one namespace share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore import blocks as table
from kvstore import ids
from kvstore.env import Environment, MapFull, Reader, Writer
from kvstore.errors import CapError, KVStoreError, LayoutError, StoreFullError
from kvstore.eviction import LeastRecentlyUsed, Limits, Policy, Victims, evict_to, free_some, make_room
from kvstore.layout import Layout
from kvstore.radix import NodeLimit, Removed, nodes
from kvstore.records.block import Geometry
from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN
from kvstore.records.meta import NamespaceRecord
from kvstore.records.node import node_key
from kvstore.staging import BufferPool

__all__ = ["NamespaceScope", "StoreCounters", "StoreScope"]

_log = logging.getLogger("kvstore")
_T = TypeVar("_T")

_MAP_FULL_TRIES = 5
_POINTS_A_TRY = 2  # twice as many with each further try: what one try frees can be used only by the one after the next
_TOUCHES_HELD = 4096
_PAGES_EVICTED_AT_ONCE = 8192
_STATE_CHUNK = 1 << 20  # states of a layout whose row blocks are smaller than this are cut at this size


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


@dataclass
class StoreScope:
    """Shared by all handles of one store in a process. Thread-safe.

    Attributes
    ----------
    environment : Environment
        The open file.
    lock_timeout : float
        Seconds that a write waits for other writers.
    damaged : set of bytes
        Blocks that failed their checks in this process and are not marked in the file yet. Refused at once.
    """

    environment: Environment
    lock_timeout: float
    policy: Policy = field(default_factory=LeastRecentlyUsed)
    counters: StoreCounters = field(default_factory=StoreCounters)
    pool: BufferPool = field(default_factory=lambda: BufferPool(48 << 20, align=PAYLOAD_ALIGN, skew=PAGE_HEADER))
    damaged: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._touches: dict[int, int] = {}
        self._guard = threading.Lock()
        self._victims = Victims(self.policy)
        self._classes: tuple[int, frozenset[int], frozenset[int]] = (-1, frozenset(), frozenset())

    def touch(self, node: int) -> None:
        """Remember that a node was used; written with the next transaction, so that a hit costs no durable write."""
        with self._guard:
            self._touches[node] = nodes.now()
            while len(self._touches) > _TOUCHES_HELD:
                del self._touches[next(iter(self._touches))]

    def refuse(self, block_id: bytes) -> None:
        """Refuse a block from now on: it failed its checks. Marked in the file by the next transaction."""
        with self._guard:
            if block_id not in self.damaged:
                self.damaged.add(block_id)
                self.counters.damaged_blocks += 1

    def bad(self, txn: Reader | Writer) -> frozenset[bytes]:
        """All blocks to refuse: marked in the file, or found damaged by this process."""
        marked = table.bad_blocks(txn)
        return marked | self.damaged if self.damaged else marked

    def limits(self, txn: Reader | Writer) -> Limits:
        """How full the file may be, given the size classes of the namespaces it holds."""
        _, sizes, _ = self._known(txn)
        environment = self.environment
        return Limits(environment.map_pages, max(sizes, default=1), len(sizes) > 1)

    def _known(self, txn: Reader | Writer) -> tuple[int, frozenset[int], frozenset[int]]:
        count = txn.entries(txn.db.namespaces)
        if self._classes[0] != count:
            sizes, stateful = set(), set()
            for key, raw in txn.items(txn.db.namespaces):
                record = NamespaceRecord.decode(key, raw)
                try:
                    layout = Layout.decode(record.layout)
                except LayoutError:
                    continue  # of a newer kvstore; its leaves are evicted like any other
                sizes.add(block_geometry(layout, self.environment.page_bytes).full_pages)
                if layout.states:
                    stateful.add(record.root)
            self._classes = (count, frozenset(sizes), frozenset(stateful))
        return self._classes

    def make_room(self, txn: Writer, pages: int, keep: set[int]) -> Removed:
        """Evict, inside a transaction, what would lift the store above its limit. Raises StoreFullError."""
        removed = make_room(txn, self._victims, self.limits(txn), pages, frozenset(keep), self._known(txn)[2])
        self.counters.evicted_nodes += removed.nodes
        self.counters.evicted_tokens += removed.tokens
        return removed

    def transact(self, work: Callable[[Writer], _T], keep: set[int] | None = None) -> _T:
        """Run `work` in a write transaction, with pending marks and touches; try again where LMDB found no contiguous pages.

        `work` may be called several times, each time in a fresh transaction that sees nothing of the earlier tries.

        Raises
        ------
        SpacePinned
            When an open reader pins the pages that were freed. Nothing is evicted for it.
        StoreFullError, WriteLockTimeout, StoreDamagedError
        """
        for attempt in range(_MAP_FULL_TRIES + 1):
            try:
                return self._transact(work, self.lock_timeout)
            except MapFull as error:
                cause = self.environment.classify_full(error)
                if cause is not None:
                    raise cause from error
                if attempt == _MAP_FULL_TRIES:
                    raise StoreFullError(f"no contiguous free pages after {attempt} tries; raise the cap ({error})") from error
                self._free_some(_POINTS_A_TRY << attempt, frozenset(keep or ()))
        raise AssertionError("unreachable")

    def _free_some(self, points: int, keep: frozenset[int]) -> None:
        try:
            with self.environment.reading() as reader:
                stateful = self._known(reader)[2]
            removed = free_some(self.environment, self._victims, points, self.lock_timeout, keep, stateful)
        except MapFull as error:
            raise StoreFullError(f"the store has no page left even to evict with; raise the cap ({error})") from error
        self.counters.evicted_nodes += removed.nodes
        self.counters.evicted_tokens += removed.tokens

    def _transact(self, work: Callable[[Writer], _T], timeout: float) -> _T:
        with self._guard:
            touches, marks = dict(self._touches), set(self.damaged)
        self.environment.reader_check_due()
        with self.environment.write(timeout) as txn:
            for block_id in marks:
                table.mark_bad(txn, block_id)
            for node, last_use in touches.items():
                if txn.get(node_key(node), txn.db.usage) is not None:
                    nodes.touch(txn, node, last_use)
            result = work(txn)
        with self._guard:
            self.damaged -= marks
            for node, last_use in touches.items():
                if self._touches.get(node) == last_use:
                    del self._touches[node]
        return result

    def evict_down(self, live_pages: int) -> Removed:
        """Evict until at most `live_pages` pages are live, or nothing is left. Several transactions."""
        removed = Removed()

        def work(txn: Writer) -> tuple[Removed, bool]:
            self._victims.refresh(txn)
            target = max(live_pages, txn.live_pages() - _PAGES_EVICTED_AT_ONCE)
            part = evict_to(txn, self._victims, target, self._known(txn)[2])
            return part, bool(part.nodes) and txn.live_pages() > live_pages

        more = True
        while more:
            part, more = self.transact(work)
            removed.add(part)
        self.counters.evicted_nodes += removed.nodes
        self.counters.evicted_tokens += removed.tokens
        return removed

    def write_pending(self, timeout: float) -> None:
        """Write marks and touches that no save has carried, if the lock is to be had; recency is not worth waiting for."""
        if not self._touches and not self.damaged:
            return
        try:
            self._transact(lambda _: None, timeout)
        except KVStoreError as error:
            _log.debug("recency of %d nodes was not written: %s", len(self._touches), error)


def block_geometry(layout: Layout, page_bytes: int) -> Geometry:
    """Sizes of a layout's blocks in files of this page size."""
    return Geometry.of(page_bytes, len(layout.streams), layout.payload_bytes(layout.block_tokens))


@dataclass(frozen=True, slots=True)
class NamespaceScope:
    """A namespace as saves and leases see it: what follows from its layout, its salt and the file.

    Attributes
    ----------
    store : StoreScope
        The store it lies in.
    layout : Layout
        The layout.
    namespace : bytes
        The namespace's id.
    root : int
        Its root in the radix index.
    domain : bytes
        The key under which its blocks are hashed.
    geometry : Geometry
        Sizes of its blocks.
    limit : NodeLimit
        How long its edges may become.
    chunk_bytes : int
        Payload bytes of a block of states.
    """

    store: StoreScope
    layout: Layout
    namespace: bytes
    root: int
    domain: bytes
    geometry: Geometry
    limit: NodeLimit
    chunk_bytes: int

    @classmethod
    def open(cls, store: StoreScope, layout: Layout, salt: bytes) -> NamespaceScope:
        """Find a namespace in the store, or create it (which waits for the write lock).

        Raises
        ------
        CapError
            When the store is too small to work with blocks of this layout.
        """
        environment = store.environment
        geometry = block_geometry(layout, environment.page_bytes)
        chunk = max(layout.payload_bytes(layout.block_tokens), _STATE_CHUNK)
        blocks = max(geometry.full_pages, Geometry.of(environment.page_bytes, 1, chunk).full_pages if layout.states else 0)
        if Limits(environment.map_pages, blocks, False).live_pages < 2 * blocks:
            raise CapError(
                f"a block of this layout takes {blocks * environment.page_bytes} bytes, the store's cap of "
                f"{environment.record.cap} leaves no room to keep and evict such blocks; raise the cap to at least "
                f"{(5 * blocks + 128) * environment.page_bytes}, or choose a smaller block_tokens"
            )
        digest = ids.salt_digest(salt)
        namespace = ids.namespace_id(layout.fingerprint, digest)
        root = _find(environment, namespace, layout)
        if root is None:
            root = store.transact(lambda txn: _create(txn, namespace, layout, digest))
        checkpoint_blocks = -(-layout.states_bytes // chunk) if layout.states else 0
        limit = NodeLimit.of(environment.page_bytes, layout.block_tokens, checkpoint_blocks)
        return cls(store, layout, namespace, root, ids.block_domain(namespace), geometry, limit, chunk)


def _find(environment: Environment, namespace: bytes, layout: Layout) -> int | None:
    with environment.reading() as txn:
        return _root(txn, namespace, layout)


def _root(txn: Reader | Writer, namespace: bytes, layout: Layout) -> int | None:
    raw = txn.get(namespace, txn.db.namespaces)
    if raw is None:
        return None
    record = NamespaceRecord.decode(namespace, raw)
    if record.layout != layout.canonical:
        raise KVStoreError(f"namespace {namespace.hex()} is stored with another layout than it was named after; verify the store")
    return record.root


def _create(txn: Writer, namespace: bytes, layout: Layout, digest: bytes) -> int:
    root = _root(txn, namespace, layout)
    if root is None:
        root = nodes.new_node_id(txn)
        record = NamespaceRecord(namespace, root, time.time_ns() // 1000, digest, layout.canonical)
        txn.put(txn.db.namespaces, namespace, record.encode())
    return root
