"""What a store holds, and what happened to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from kvstore.env import Reader
from kvstore.errors import IndexDamaged, LayoutError
from kvstore.layout import Layout
from kvstore.radix import nodes
from kvstore.records.block import Ref
from kvstore.records.constants import FORMAT_VERSION
from kvstore.records.meta import NamespaceRecord
from kvstore.records.node import Node
from kvstore.scope import StoreCounters, StoreScope

_T = TypeVar("_T")

__all__ = ["NamespaceInfo", "StoreStats", "gather_stats", "list_namespaces"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store in numbers. Bytes of blocks are counted once, however many sessions share them.

    Attributes
    ----------
    path : str
        The store's directory.
    format_version : int
    max_bytes : int
        The cap.
    file_bytes : int
        What the directory takes on disk now.
    live_bytes : int
        Pages in use: blocks and index. The rest of the file is free and will be written to again.
    payload_bytes : int
        Payload of all blocks.
    limit_bytes : int
        The most that `live_bytes` may be before a save evicts.
    blocks, nodes, namespaces, bad_blocks : int
        Records.
    readers_pinning : bool
        Whether a reader of any process is open now.
    counters : StoreCounters
        What happened through this process since it opened the store.
    """

    path: str
    format_version: int
    max_bytes: int
    file_bytes: int
    live_bytes: int
    payload_bytes: int
    limit_bytes: int
    blocks: int
    nodes: int
    namespaces: int
    bad_blocks: int
    readers_pinning: bool
    counters: StoreCounters


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace in numbers.

    Attributes
    ----------
    namespace_id : str
        Hexadecimal.
    model : str
        The layout's model, or what is wrong with the layout.
    block_tokens, token_bytes : int
        Positions in a block; bytes of one token.
    sessions : int
        Leaves of its index: sessions that are no prefix of another one.
    nodes, tokens : int
        Index nodes, and the distinct token positions that they hold.
    checkpoints : int
        Complete checkpoints.
    rows_bytes, states_bytes : int
        Payload of its blocks of rows, and of those of its checkpoints.
    last_use : int
        Microseconds since the epoch; 0 when it holds nothing.
    """

    namespace_id: str
    model: str
    block_tokens: int
    token_bytes: int
    sessions: int
    nodes: int
    tokens: int
    checkpoints: int
    rows_bytes: int
    states_bytes: int
    last_use: int


def gather_stats(scope: StoreScope) -> StoreStats:
    """Count what a store holds. Reads the small records of all blocks; touches no payload."""
    environment = scope.environment
    reader_open = environment.readers.oldest() is not None
    with environment.reading() as txn:
        payload = sum(ref.payload_bytes for ref in _readable(txn.items(txn.db.refs), Ref.decode))
        return StoreStats(
            path=environment.path,
            format_version=FORMAT_VERSION,
            max_bytes=environment.record.cap,
            file_bytes=environment.file_bytes(),
            live_bytes=txn.live_pages() * environment.page_bytes,
            payload_bytes=payload,
            limit_bytes=scope.limits(txn).live_pages * environment.page_bytes,
            blocks=txn.entries(txn.db.blocks),
            nodes=txn.entries(txn.db.nodes),
            namespaces=txn.entries(txn.db.namespaces),
            bad_blocks=len(scope.bad(txn)),
            readers_pinning=reader_open,
            counters=replace(scope.counters),
        )


def list_namespaces(scope: StoreScope) -> list[NamespaceInfo]:
    """Describe every namespace. Reads the whole index once."""
    with scope.environment.reading() as txn:
        held: dict[int, list[Node]] = {}
        for node in _readable(txn.items(txn.db.nodes), lambda key, raw: Node.decode(int.from_bytes(key, "big"), raw)):
            held.setdefault(node.root, []).append(node.replace(tokens=node.tokens[:4]))
        records = _readable(txn.items(txn.db.namespaces), NamespaceRecord.decode)
        return [_describe(txn, record, held.get(record.root, [])) for record in records]


def _readable(items: Iterator[tuple[bytes, bytes]], decode: Callable[[bytes, bytes], _T]) -> Iterator[_T]:
    """Decode records, passing over damaged ones: a look into a store has to work when it is needed most."""
    for key, raw in items:
        with contextlib.suppress(IndexDamaged):
            yield decode(key, raw)


def _describe(txn: Reader, record: NamespaceRecord, held: list[Node]) -> NamespaceInfo:
    try:
        layout = Layout.decode(record.layout)
        model, block_tokens, token_bytes = layout.model, layout.block_tokens, round(layout.token_bytes)
    except LayoutError as error:
        model, block_tokens, token_bytes = f"({error})", 0, 0
    parents = {node.parent for node in held}
    states = {block for node in held for c in node.checkpoints for block in c.ids}
    rows = {block for node in held for block in node.referenced()} - states
    return NamespaceInfo(
        namespace_id=record.namespace.hex(),
        model=model,
        block_tokens=block_tokens,
        token_bytes=token_bytes,
        sessions=sum(node.node not in parents for node in held),
        nodes=len(held),
        tokens=sum(node.end - node.start for node in held),
        checkpoints=sum(c.complete for node in held for c in node.checkpoints),
        rows_bytes=_payload(txn, rows),
        states_bytes=_payload(txn, states),
        last_use=max((nodes.usage_of(txn, node.node).last_use for node in held), default=0),
    )


def _payload(txn: Reader, block_ids: set[bytes]) -> int:
    """Payload bytes of blocks, each once; nothing for one whose record is damaged."""
    found = 0
    for block_id in block_ids:
        raw = txn.get(block_id, txn.db.refs)
        if raw is not None:
            with contextlib.suppress(IndexDamaged):
                found += Ref.decode(block_id, raw).payload_bytes
    return found
