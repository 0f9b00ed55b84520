"""A namespace: sessions of one layout under one salt. Save, match, lease, evict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvstore.arrays import Array, StreamArray
from kvstore.env import Writer
from kvstore.eviction import evict_point
from kvstore.ids import TokenArray, Tokens, as_tokens, token_bytes
from kvstore.layout import Layout
from kvstore.leases import Lease, Match, find_prefix, open_lease
from kvstore.radix import Removed, nodes, walk
from kvstore.saving import Saver, SaveResult
from kvstore.scope import NamespaceScope, StoreScope

__all__ = ["EvictResult", "Namespace", "evict_all", "evict_session"]


@dataclass(frozen=True, slots=True)
class EvictResult:
    """What an eviction took out of the store.

    Attributes
    ----------
    nodes, tokens : int
        Index nodes removed, and the token positions of their edges.
    freed_bytes : int
        Bytes of the blocks that nothing refers to any more. They can be written to again; the file does not shrink.
    """

    nodes: int
    tokens: int
    freed_bytes: int


class Namespace:
    """Sessions of one layout under one salt. Made by `Store.namespace`; thread-safe; namespaces share nothing.

    Attributes
    ----------
    layout : Layout
        The layout.
    namespace_id : bytes
        32 bytes, from the layout's fingerprint and the salt's digest.
    """

    def __init__(self, scope: NamespaceScope, check_open: Callable[[], object]) -> None:
        self._scope = scope
        self._check_open = check_open
        self.layout: Layout = scope.layout
        self.namespace_id: bytes = scope.namespace

    def save(
        self,
        tokens: Tokens,
        arrays: Mapping[str, StreamArray],
        *,
        states: Mapping[str, Array] | None = None,
        start: int = 0,
        check: bool = False,
    ) -> SaveResult:
        """Save a session: durably, and only what is not stored yet. When it returns, the snapshot survives a power loss.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            The whole prefix, 1-D, each in [0, 2**32).
        arrays : mapping of str to ndarray or Paged
            Every stream of the layout: the rows of the positions [start, len(tokens)), any strides. Read only during the
            call, and only where rows are new; don't change them meanwhile.
        states : mapping of str to ndarray, optional
            Every state of the layout at position len(tokens). Without them only the rows are saved, and a layout with states
            can be restored up to its last checkpoint.
        start : int
            Position of the arrays' first row, a multiple of `layout.block_tokens`.
        check : bool
            Compare the given rows with those that are stored already, and report which blocks differ. The stored ones stay:
            equal tokens share the bytes of whoever saved them first.

        Returns
        -------
        SaveResult

        Raises
        ------
        TokensError, ArrayError
            When the input doesn't fit; nothing is changed.
        BaseLost
            When what is stored ends before `start` (it may just have been evicted).
        StoreFullError, SpacePinned, DiskError, WriteLockTimeout
            When there is no room, the disk fails, or the lock isn't to be had. A shorter prefix may have been saved.
        """
        saver = Saver(self._checked(), as_tokens(tokens))
        return saver.save(dict(arrays), start, states, check=check)

    def match(self, tokens: Tokens, *, limit: int | None = None) -> Match | None:
        """How many leading tokens could be restored now; None when none. Asking promises nothing: a lease does.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            The prompt. They are compared token by token.
        limit : int, optional
            The most that may be restored. A server passes len(tokens) - 1, so that something is left to compute.
        """
        scope = self._checked()
        prompt = as_tokens(tokens)
        with scope.store.environment.reading() as txn:
            found = find_prefix(scope, txn, token_bytes(prompt), _limit(prompt, limit))
        return Match(found.length, found.path.matched) if found.length else None

    def lease(self, tokens: Tokens, *, limit: int | None = None) -> Lease:
        """Pin the longest stored prefix of a prompt. Use it in a `with` block and keep it short.

        A miss is a lease of length 0, which is false. Parameters as for `match`.
        """
        scope = self._checked()
        prompt = as_tokens(tokens)
        return open_lease(scope, prompt, _limit(prompt, limit))

    def evict(self, tokens: Tokens | None = None) -> EvictResult:
        """Remove a session, or all of the namespace's.

        Parameters
        ----------
        tokens : sequence of int, or integer array, optional
            The session. What other sessions share with it stays, and so does a longer session that contains it whole.
            Without tokens everything in the namespace goes.

        Raises
        ------
        WriteLockTimeout, StoreFullError
        """
        scope = self._checked()
        prompt = None if tokens is None else token_bytes(as_tokens(tokens))
        if prompt is None:
            with scope.store.environment.reading() as txn:
                root = scope.root(txn)
            return evict_all(scope.store, root)
        return evict_session(scope, prompt)

    @property
    def scope(self) -> NamespaceScope:
        """What the layers above work with. Not part of the public interface."""
        return self._scope

    def _checked(self) -> NamespaceScope:
        self._check_open()
        return self._scope


def _limit(prompt: TokenArray, limit: int | None) -> int:
    return prompt.size if limit is None else max(0, min(int(limit), prompt.size))


def evict_session(scope: NamespaceScope, prompt: bytes, *, durable: bool = True) -> EvictResult:
    """Remove what only one session uses; see `Namespace.evict`.

    Parameters
    ----------
    prompt : bytes
        Its tokens as uint32 little-endian.
    durable : bool
        False where it doesn't matter when a crash brings it back.
    """
    removed = Removed()
    left = prompt
    while left:
        part, left = scope.store.transact(partial(_evict_session, scope, left), durable=durable)
        removed.add(part)
    return _result(scope.store, removed)


def _evict_session(scope: NamespaceScope, prompt: bytes, txn: Writer) -> tuple[Removed, bytes]:
    """Remove the nodes that only this session uses, from its end up to where another one branches off.

    Of a long one no more than one transaction should: then also returns what is left of the prompt, else nothing.
    """
    removed = Removed()
    path = walk(txn, scope.root(txn), prompt, tolerant=True)
    if path.inside or path.matched < len(prompt) // 4:
        return removed, b""  # it isn't stored whole: what is there is another session's, or the edge is that of a longer one
    keep, stateful = frozenset(node.node for node in path.nodes), scope.store.stateful(txn)
    for node in reversed(path.nodes):
        if nodes.has_children(txn, node.node):
            break
        removed.add(evict_point(txn, node.node, keep, stateful))
        if removed.enough:
            return removed, prompt[: 4 * node.start]
    return removed, b""


def evict_all(store: StoreScope, root: int) -> EvictResult:
    """Remove everything below a namespace's root, some nodes a transaction."""
    removed = Removed()
    while (part := store.transact(lambda txn: _evict_some(txn, root))).nodes:
        removed.add(part)
    return _result(store, removed)


def _result(store: StoreScope, removed: Removed) -> EvictResult:
    store.count_evicted(removed)
    return EvictResult(removed.nodes, removed.tokens, removed.pages * store.environment.page_bytes)


def _evict_some(txn: Writer, root: int) -> Removed:
    """Remove some leaves, found by walking down first children."""
    removed = Removed()
    while not removed.enough:
        node = next(nodes.children_of(txn, root), None)
        if node is None:
            nodes.drop_root(txn, root)
            break
        while (below := next(nodes.children_of(txn, node), None)) is not None:
            node = below
        removed.add(evict_point(txn, node, frozenset(), {}))
    return removed
