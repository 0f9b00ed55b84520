"""Making room: which sessions are least worth keeping, and removing them inside the transaction that needs their pages.

The limit on live pages leaves room for what LMDB cannot use at once: pages freed in transaction N can be used from N + 2, and a
value needs a contiguous run. Because eviction happens in the saving transaction, an abort undoes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.env import Environment, Reader, Writer
from kvstore.errors import IndexDamaged, StoreFullError
from kvstore.radix import CheckpointPolicy, Removed, nodes, remove_point
from kvstore.records.meta import COUNTERS_KEY
from kvstore.records.node import Usage, node_key

__all__ = [
    "Candidate",
    "LeastRecentlyUsed",
    "Limits",
    "Policy",
    "RankingUsedUp",
    "Stateful",
    "Victims",
    "evict_point",
    "evict_to",
    "free_some",
    "has_room",
    "make_room",
]

# the roots of the namespaces whose layout has states, and their policies as far as this process has been told them
Stateful = Mapping[int, CheckpointPolicy | None]

_USUAL_PAGE_BYTES = 32768
_TREE_PAGES = 24  # what the trees themselves may grow by, and their copies, in one transaction
_ONE_SIZE, _MIXED = 0.92, 0.86  # of the map may be live; measured: docs/architecture.md


@dataclass(frozen=True, slots=True)
class Limits:
    """How full a file may be.

    Attributes
    ----------
    map_pages : int
        Pages that the file can have.
    block_pages : int
        Pages of the largest block.
    mixed : bool
        Whether blocks of several size classes share the file; free space is more fragmented then.
    """

    map_pages: int
    block_pages: int
    mixed: bool

    @property
    def live_pages(self) -> int:
        """The most pages that may be live after a transaction."""
        return self._live(_MIXED if self.mixed else _ONE_SIZE)

    @property
    def most_pages(self) -> int:
        """The same for a store that has just become a mixed one: it comes down to `live_pages` in several transactions."""
        return self._live(_ONE_SIZE)

    def _live(self, share: float) -> int:
        return max(min(int(self.map_pages * share), self.map_pages - 3 * self.piece_pages - 2 * _TREE_PAGES), 0)

    @property
    def piece_pages(self) -> int:
        """Pages that one of several transactions may write: about 16 MiB, less in a small file, at least one block."""
        return self._near(16 << 20)

    @property
    def portion_pages(self) -> int:
        """Pages of blocks that are prepared together: about 4 MiB, less in a small file, at least one block."""
        return self._near(4 << 20)

    @property
    def single_pages(self) -> int:
        """Up to how many pages a save is one transaction: about 48 MiB, less in a small file; three fit beside what is live."""
        return max(self.piece_pages, min(self._near(48 << 20), self.map_pages // 48))

    def _near(self, size: int) -> int:
        """Pages of as many whole blocks as come nearest to `size` bytes: a 4 MiB block and its header take 129 pages."""
        blocks = max(round(size / _USUAL_PAGE_BYTES / self.block_pages), 1)
        return max(self.block_pages, min(blocks * self.block_pages, self.map_pages // 32))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the last pass over `usage` saw it."""

    node: int
    usage: Usage


class Policy(Protocol):
    """Orders nodes by how little they are worth keeping. It is code, not format: it may change at any time."""

    def rank(self, candidates: Iterable[Candidate]) -> Sequence[Candidate]:
        """Return the candidates, the least worth keeping first; two of them in the same order as among all."""


class LeastRecentlyUsed:
    """The node used longest ago goes first; of two used at once, the deeper (newer) one."""

    def rank(self, candidates: Iterable[Candidate]) -> Sequence[Candidate]:
        """See `Policy.rank`."""
        return sorted(candidates, key=lambda c: (c.usage.last_use, -c.node))


class RankingUsedUp(Exception):
    """A transaction has to evict and nobody is left of the ranking: it starts over, with one made while it held no lock."""


class Victims:
    """Candidates for eviction, from a pass over `usage`; each is checked again before it goes.

    The pass takes milliseconds for each thousand nodes, so it is made in a read transaction while nobody waits (`rank`), and handed
    to the next write transaction (`begin`). All but `rank` and `forget` under the write lock only.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranked: deque[Candidate] = deque()
        self._just_ranked = False
        self.stale = False

    def rank(self, txn: Reader | Writer) -> Sequence[Candidate]:
        """Rank all nodes."""
        seen = (
            Candidate(int.from_bytes(key, "big"), nodes.usage_from(int.from_bytes(key, "big"), raw))
            for key, raw in txn.items(txn.db.usage)
            if len(key) == len(node_key(0))
        )
        return self._policy.rank(seen)

    def begin(self, ranking: Sequence[Candidate] | None) -> None:
        """Take over, at the beginning of a write transaction, a ranking made for it; None goes on with the one there is."""
        self._just_ranked = ranking is not None
        if ranking is not None:
            self._ranked, self.stale = deque(ranking), False

    def forget(self) -> None:
        """Rank anew before the next one is taken: a transaction that took some was aborted. May be called from any thread."""
        self.stale = True

    def next(self, txn: Writer, keep: frozenset[int]) -> int | None:
        """The next node that is still there, unused since it was ranked, without children and not kept.

        A node with children is passed over: when the last of them goes it inherits their use, and `freed` brings it back.
        """
        if self.stale:
            return None
        kept: list[Candidate] = []
        found = None
        while self._ranked and found is None:
            candidate = self._ranked.popleft()
            if candidate.node in keep:
                kept.append(candidate)
                continue
            raw = txn.get(node_key(candidate.node), txn.db.usage)
            if raw is None or nodes.usage_from(candidate.node, raw).last_use != candidate.usage.last_use:
                continue
            if not nodes.has_children(txn, candidate.node):
                found = candidate.node
        self._ranked.extendleft(reversed(kept))
        return found

    def take(self, txn: Writer, keep: frozenset[int]) -> int | None:
        """As `next`, for a transaction that needs one; None when there is nothing left to evict.

        Raises
        ------
        RankingUsedUp
            When nobody is left of the ranking. In a transaction that was given a new one nobody can be left at all: only then, to
            be sure, it ranks anew here.
        """
        node = self.next(txn, keep)
        while node is None:
            if not self._just_ranked:
                raise RankingUsedUp
            self._ranked, self.stale = deque(self.rank(txn)), False
            node = self.next(txn, keep)
            if not self.stale:
                return node
        return node

    def freed(self, txn: Writer, node: int) -> None:
        """Bring back a node that has just lost a child. In its turn: a trunk may be in use whose branches were not."""
        raw = txn.get(node_key(node), txn.db.usage)
        if raw is None:
            return
        candidate = Candidate(node, nodes.usage_from(node, raw))
        low, high = 0, len(self._ranked)
        while low < high:
            middle = (low + high) // 2
            if self._policy.rank((candidate, self._ranked[middle]))[0] is candidate:
                high = middle
            else:
                low = middle + 1
        self._ranked.insert(low, candidate)


def has_room(txn: Writer, limits: Limits, pages: int) -> bool:
    """Whether `pages` more pages fit under the limit as it is."""
    return _live_with(txn, pages) <= limits.live_pages


def _live_with(txn: Writer, pages: int) -> int:
    return txn.live_pages() + pages + _TREE_PAGES // 2


def make_room(txn: Writer, victims: Victims, limits: Limits, pages: int, keep: frozenset[int], stateful: Stateful) -> Removed:
    """Evict until `pages` more pages fit under the limit. Overshoots by one node at most.

    Where the limit has just come down by much others would wait long: it evicts more than is put, and the next saves go on.

    Parameters
    ----------
    pages : int
        What the transaction is about to put.
    keep : frozenset of int
        Nodes that must stay: a saver never evicts its own path.
    stateful : Stateful
        Roots of the namespaces whose layout has states.

    Raises
    ------
    StoreFullError
        When everything that may go is gone and it is not enough. The transaction must be aborted.
    """
    removed = Removed()
    live = _live_with(txn, pages)
    needed = live - limits.live_pages
    at_once = max(live - limits.most_pages, 2 * pages)
    while removed.pages < needed and not (removed.enough and removed.pages >= at_once):
        node = victims.take(txn, keep)
        if node is None:
            raise StoreFullError(
                f"the save needs {pages} pages of {txn.page_bytes} bytes, {needed - removed.pages} more than can be freed in a "
                f"store of {limits.map_pages} pages; raise the cap or save less at once"
            )
        _evict(txn, victims, node, removed, keep, stateful)
    return removed


def evict_to(txn: Writer, victims: Victims, live_pages: int, keep: frozenset[int], stateful: Stateful) -> Removed:
    """Evict until at most `live_pages` pages are live, nothing is left that may go, or it is enough for one transaction."""
    removed = Removed()
    while not removed.enough and txn.live_pages() > live_pages and (node := victims.take(txn, keep)) is not None:
        _evict(txn, victims, node, removed, keep, stateful)
    return removed


def _evict(txn: Writer, victims: Victims, node: int, removed: Removed, keep: frozenset[int], stateful: Stateful) -> None:
    point = evict_point(txn, node, keep, stateful)
    removed.add(point)
    if point.above:
        victims.freed(txn, point.above)


def evict_point(txn: Writer, node: int, keep: frozenset[int], stateful: Stateful) -> Removed:
    """Evict one leaf and what became worthless with it. A leaf whose record is damaged loses what can be found of it."""
    try:
        leaf = nodes.load(txn, node)
    except IndexDamaged:
        nodes.drop_unreadable(txn, node)
        return Removed(1, 0, 0)
    return remove_point(txn, leaf, has_states=leaf.root in stateful, keep=keep, policy=stateful.get(leaf.root))


def free_some(
    environment: Environment, victims: Victims, points: int, timeout: float, keep: frozenset[int], stateful: Stateful
) -> Removed:
    """Evict a few points in a transaction of their own, when LMDB found no contiguous run of pages.

    What they free can be used by the transaction that the caller begins next.
    """
    removed = Removed()
    with environment.reading() as reader:
        ranking = victims.rank(reader)
    with environment.write(timeout) as txn:
        victims.begin(ranking)
        for _ in range(points):
            node = victims.take(txn, keep)
            if node is None:
                break
            _evict(txn, victims, node, removed, keep, stateful)
    _let_pass(environment, timeout)  # also where nobody was left: what the transaction before has freed comes of age
    return removed


def _let_pass(environment: Environment, timeout: float) -> None:
    """Let a transaction pass: pages that one has freed can be used by the next but one. It has to change something."""
    with environment.write(timeout, durable=False) as txn:
        raw = txn.get(COUNTERS_KEY, txn.db.meta)
        if raw is not None:
            txn.put(txn.db.meta, COUNTERS_KEY, raw)
