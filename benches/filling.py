"""Many small sessions in a store, in a time that a benchmark can wait: a number of them a transaction.

What a save does for each session is done here for many with one commit; the store that comes out is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from benches.sessions import Array
from kvstore import Namespace
from kvstore.blocks import PreparedBlock
from kvstore.env import Writer
from kvstore.ids import as_tokens, token_bytes
from kvstore.radix import grow, nodes
from kvstore.saving import gather_rows, release
from kvstore.scope import NamespaceScope

__all__ = ["fill"]

_BYTES = 8 << 20  # of blocks in a transaction, about


_Prepared = list[tuple[bytes, dict[int, PreparedBlock]]]


def fill(namespace: Namespace, sessions: Iterable[tuple[Array, Mapping[str, Array]]]) -> int:
    """Save sessions (tokens, and all rows of all streams) of about equal size; return how many. The cap must have room."""
    scope = namespace.scope
    left = iter(sessions)
    count, many = 0, 1
    while part := list(islice(left, many)):
        prepared = [(token_bytes(as_tokens(tokens)), gather_rows(scope, arrays, 0, 0, tokens.size)) for tokens, arrays in part]
        pages = _publish(scope, prepared)
        count += len(part)
        many = max(_BYTES // max(pages * scope.store.environment.page_bytes // len(part), 1), 1)
    scope.store.environment.settle()
    return count


def _publish(scope: NamespaceScope, prepared: _Prepared) -> int:
    """Put sessions into the store in one transaction; return how many pages their blocks took at most."""
    blocks = [block for _, rows in prepared for block in rows.values()]
    pages = sum(scope.geometry.pages(block.value.nbytes) for block in blocks)

    def work(txn: Writer) -> None:
        scope.store.make_room(txn, pages, set())
        root = scope.ensure_root(txn)
        for prompt, rows in prepared:
            grown = grow(txn, root, prompt, rows, scope.limit, frozenset())
            nodes.touch(txn, grown.leaf, nodes.now())

    try:
        scope.store.transact(work, durable=False)
    finally:
        release(scope, blocks)
    return pages
