"""A namespace as saves and leases see it: what follows from its layout, its salt and the file."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore import ids
from kvstore.env import Reader, Writer
from kvstore.errors import CapError, IndexDamaged
from kvstore.eviction import Limits
from kvstore.layout import Layout
from kvstore.radix import CheckpointPolicy, NodeLimit, nodes
from kvstore.records.block import Geometry
from kvstore.records.meta import NamespaceRecord, RootRecord
from kvstore.records.states import max_packed_bytes
from kvstore.scope.store import StoreScope

__all__ = ["NamespaceScope"]

_STATE_CHUNK = 1 << 20  # states of a layout whose row blocks are smaller than this are cut at this size


@dataclass(slots=True)
class NamespaceScope:
    """What the calls on one namespace share. Thread-safe.

    A namespace comes into being with its first save and goes with its last session, so that salts which are used once leave
    nothing behind. Its root is therefore looked up in each transaction.

    Attributes
    ----------
    store : StoreScope
        The store it lies in.
    layout : Layout
        The layout.
    namespace, salt : bytes
        The namespace's id, and the digest of its salt.
    domain : bytes
        The key under which its blocks are hashed.
    geometry, states_geometry : Geometry
        Sizes of its blocks of rows and of states.
    limit : NodeLimit
        How long its edges may become.
    chunk_bytes : int
        Payload bytes of a block of states.
    policy : CheckpointPolicy
        Which of its checkpoints are kept.
    """

    store: StoreScope
    layout: Layout
    namespace: bytes
    salt: bytes
    domain: bytes
    geometry: Geometry
    states_geometry: Geometry
    limit: NodeLimit
    chunk_bytes: int
    policy: CheckpointPolicy
    _root: int = 0

    @classmethod
    def of(cls, store: StoreScope, layout: Layout, salt: bytes, policy: CheckpointPolicy | None = None) -> NamespaceScope:
        """Work out a namespace of a store. Reads and writes nothing.

        Without a `policy` it has that of the process's latest handle on it, or else the default one.

        Raises
        ------
        CapError
            When the store is too small to work with blocks of this layout.
        """
        return cls.of_digest(store, layout, ids.salt_digest(salt), policy)

    @classmethod
    def of_digest(cls, store: StoreScope, layout: Layout, digest: bytes, policy: CheckpointPolicy | None = None) -> NamespaceScope:
        """As `of`, where nothing but the digest of the salt is known: that is what a store keeps of it."""
        environment = store.environment
        page_bytes = environment.page_bytes
        payload = layout.payload_bytes(layout.block_tokens)
        geometry = Geometry.of(page_bytes, len(layout.streams), payload)
        chunk = max(payload, _STATE_CHUNK)
        states = Geometry.of(page_bytes, 1, min(chunk, max_packed_bytes(layout)))
        blocks = max(geometry.full_pages, states.full_pages if layout.states else 0)
        if Limits(environment.map_pages, blocks, False).live_pages < 2 * blocks:
            raise CapError(
                f"a block of this layout takes {blocks * page_bytes} bytes, the store's cap of {environment.record.cap} leaves no "
                f"room to keep and evict such blocks; raise the cap to at least {(5 * blocks + 128) * page_bytes}, or choose a "
                "smaller block_tokens"
            )
        namespace = ids.namespace_id(layout.fingerprint, digest)
        limit = NodeLimit.of(page_bytes, layout.block_tokens, -(-layout.states_bytes // chunk) if layout.states else 0)
        domain = ids.block_domain(namespace)
        return cls(store, layout, namespace, digest, domain, geometry, states, limit, chunk, store.policy_of(namespace, policy))

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Pages of its full blocks: of rows, and of states if its layout has any."""
        return (self.geometry.full_pages, self.states_geometry.full_pages) if self.layout.states else (self.geometry.full_pages,)

    def root(self, txn: Reader | Writer) -> int:
        """The namespace's root in a transaction; 0, below which nothing is stored, when there is none."""
        if self._root and self._stands_for(txn, self._root):
            return self._root
        named, damaged = self._named(txn)
        if damaged:
            named = self._found(txn)
        if named and self._stands_for(txn, named):
            self._root = named
            return named
        return 0

    def _named(self, txn: Reader | Writer) -> tuple[int, bool]:
        """The root that the namespace's record names, 0 without one; and whether there is one that can't be read."""
        raw = txn.get(self.namespace, txn.db.namespaces)
        if raw is None:
            return 0, False
        try:
            record = NamespaceRecord.decode(self.namespace, raw)
        except IndexDamaged:
            return 0, True
        return (record.root, False) if record.layout == self.layout.canonical else (0, True)

    def _found(self, txn: Reader | Writer) -> int:
        """The root that says it stands for this namespace, looked for among all; 0 if there is none."""
        for key, _ in txn.items(txn.db.roots):
            root = int.from_bytes(key, "big")
            if self._stands_for(txn, root):
                return root
        return 0

    def _stands_for(self, txn: Reader | Writer, root: int) -> bool:
        raw = txn.get(root.to_bytes(8, "big"), txn.db.roots)
        try:
            return raw is not None and RootRecord.decode(root, raw).namespace == self.namespace
        except IndexDamaged:
            return False

    def ensure_root(self, txn: Writer) -> int:
        """The namespace's root, created if there is none. Sets right a record of the two that was lost or damaged."""
        named, damaged = self._named(txn)
        if named and self._stands_for(txn, named):
            self._root = named
            return named
        txn.damage = txn.damage or damaged or bool(named)
        # a namespace record without its root was damaged, since both go together; a root without its namespace likewise
        root = named or (self._found(txn) if damaged or self._root else 0) or nodes.new_node_id(txn)
        states = self.states_geometry.full_pages if self.layout.states else 0
        stands_for = RootRecord(root, self.namespace, self.geometry.full_pages, states)
        txn.put(txn.db.roots, stands_for.key, stands_for.encode())
        record = NamespaceRecord(self.namespace, root, time.time_ns() // 1000, self.salt, self.layout.canonical)
        txn.put(txn.db.namespaces, self.namespace, record.encode())
        return root  # not remembered: an abort would take it back
