"""The roots of a store: which sizes of blocks its namespaces have, and which of them have states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvstore.env import Reader, Writer
from kvstore.errors import IndexDamaged
from kvstore.radix import CheckpointPolicy
from kvstore.records.meta import RootRecord

__all__ = ["NO_ROOTS", "PolicyOfRoot", "Roots"]


@dataclass(frozen=True, slots=True)
class Roots:
    """What the roots of a store are like.

    Attributes
    ----------
    version : tuple of (int, bytes)
        How many there are and the last of them: ids only grow, so it tells every set of them from every other.
    sizes : frozenset of int
        Pages of their full blocks, of rows and of states.
    stateful : mapping of int to bytes
        Those whose layout has states, and the ids of the namespaces that they stand for.
    """

    version: tuple[int, bytes]
    sizes: frozenset[int]
    stateful: Mapping[int, bytes]

    @staticmethod
    def version_in(txn: Reader | Writer) -> tuple[int, bytes]:
        """The version of the roots that a transaction sees."""
        return txn.entries(txn.db.roots), txn.last_key(txn.db.roots)

    @classmethod
    def read(cls, txn: Reader | Writer, version: tuple[int, bytes]) -> Roots:
        """Read all roots. A damaged record is passed over: its leaves are evicted like any other."""
        sizes: set[int] = set()
        stateful: dict[int, bytes] = {}
        for key, raw in txn.items(txn.db.roots):
            try:
                record = RootRecord.decode(int.from_bytes(key, "big"), raw)
            except IndexDamaged:
                continue
            sizes |= {record.block_pages, record.states_pages} - {0}
            if record.states_pages:
                stateful[record.root] = record.namespace
        return cls(version, frozenset(sizes), stateful)


NO_ROOTS = Roots((-1, b""), frozenset(), {})


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOfRoot(Mapping[int, CheckpointPolicy | None]):
    """The policies of the roots whose layout has states; None for those of namespaces that have none here.

    Looked up one by one: each save asks for a few of them under the write lock, and there may be a root for each salt.

    Attributes
    ----------
    stateful : mapping of int to bytes
        As in `Roots`.
    policies : mapping of bytes to CheckpointPolicy
        By namespace. Others may add to it meanwhile.
    """

    stateful: Mapping[int, bytes]
    policies: Mapping[bytes, CheckpointPolicy]

    def __getitem__(self, root: int) -> CheckpointPolicy | None:
        return self.policies.get(self.stateful[root])

    def __iter__(self) -> Iterator[int]:
        return iter(self.stateful)

    def __len__(self) -> int:
        return len(self.stateful)
