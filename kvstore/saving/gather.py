"""Gathering: an engine's arrays into block values, summed by the kernel, hashed, and with the rows that are stored already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore import blocks as table
from kvstore import ids
from kvstore.arrays import Array, StreamArray, check_named, check_rows, rows_of
from kvstore.blocks import PreparedBlock
from kvstore.env import Reader, Writer
from kvstore.errors import ArrayError, BlockDamaged, IndexDamaged
from kvstore.kernel import Rows, crc32c, gather, restore
from kvstore.records.block import BlockHeader, Geometry, header_bytes
from kvstore.records.constants import KIND_ROWS, KIND_STATES
from kvstore.scope import NamespaceScope

__all__ = ["check_states", "check_streams", "gather_rows", "gather_states", "merge_stored", "release"]


def check_streams(scope: NamespaceScope, arrays: Mapping[str, StreamArray], tokens: int) -> None:
    """Refuse arrays that are not exactly the layout's streams for this many positions. Raises ArrayError."""
    check_named(scope.layout, arrays, all_of_them=True)
    for stream in scope.layout.streams:
        check_rows(stream, arrays[stream.name], tokens, exact=True)


def check_states(scope: NamespaceScope, states: Mapping[str, Array]) -> None:
    """Refuse arrays that are not exactly the layout's states. Raises ArrayError."""
    known = {state.name for state in scope.layout.states}
    if known != set(states):
        missing, extra = sorted(known - set(states)), sorted(set(states) - known)
        raise ArrayError(f"a checkpoint needs every state of the layout and nothing else: missing {missing}, unknown {extra}")
    for state in scope.layout.states:
        state.check_array(states[state.name])


def gather_rows(
    scope: NamespaceScope, arrays: Mapping[str, StreamArray], origin: int, first: int, stop: int
) -> dict[int, PreparedBlock]:
    """Copy the rows of [first, stop) into blocks. They don't depend on the arrays afterwards.

    Parameters
    ----------
    arrays : mapping of str to ndarray or Paged
        The streams; their first row is that of position `origin`.
    first : int
        A block boundary.
    stop : int
        Any position behind it; the last block is a tail if this is no boundary.
    """
    layout, size = scope.layout, scope.layout.block_tokens
    rows = [rows_of(s, arrays[s.name]) for s in layout.streams]
    starts = np.arange(first, stop, size, dtype=np.int64)
    tokens = np.minimum(starts + size, stop) - starts
    padded = header_bytes(len(rows))
    values = [_value(scope, scope.geometry, padded, layout.payload_bytes(int(n))) for n in tokens]
    payloads = np.array([v.__array_interface__["data"][0] + padded for v in values], dtype=np.uint64)
    sums = gather(rows, payloads, starts - origin, tokens) if rows else np.zeros((len(values), 0), np.uint32)
    prepared: dict[int, PreparedBlock] = {}
    for start, count, value, row_sums in zip(starts, tokens, values, sums, strict=True):
        payload = layout.payload_bytes(int(count))
        prepared[int(start) // size] = _finish(scope, KIND_ROWS, int(count), value, padded, payload, row_sums)
    return prepared


def gather_states(scope: NamespaceScope, runs: Iterable[npt.NDArray[np.uint8]]) -> Iterable[PreparedBlock]:
    """Cut packed states (kvstore.records.states) into blocks, one at a time."""
    pending: list[npt.NDArray[np.uint8]] = []
    held = 0
    for whole in runs:
        run = whole
        while run.nbytes:
            part = run[: scope.chunk_bytes - held]
            pending.append(part)
            held += part.nbytes
            run = run[part.nbytes :]
            if held == scope.chunk_bytes:
                yield _states_block(scope, pending, held)
                pending, held = [], 0
    if held:
        yield _states_block(scope, pending, held)


def _states_block(scope: NamespaceScope, parts: Sequence[npt.NDArray[np.uint8]], length: int) -> PreparedBlock:
    padded = header_bytes(1)
    value = _value(scope, scope.states_geometry, padded, length)
    np.concatenate(parts, out=value[padded : padded + length])
    sums = np.array([crc32c(value[padded : padded + length])], np.uint32)
    return _finish(scope, KIND_STATES, 0, value, padded, length, sums)


def _value(scope: NamespaceScope, geometry: Geometry, padded: int, payload: int) -> npt.NDArray[np.uint8]:
    value = scope.store.pool.take(geometry.value_bytes(padded, payload))
    value[:padded] = 0  # the buffer may have held another namespace's bytes
    value[padded + payload :] = 0
    return value


def _finish(
    scope: NamespaceScope,
    kind: int,
    tokens: int,
    value: npt.NDArray[np.uint8],
    padded: int,
    payload: int,
    sums: npt.NDArray[np.uint32],
) -> PreparedBlock:
    block_id = ids.block_id(scope.domain, kind, tokens, value[padded : padded + payload].data)
    header = BlockHeader(kind, block_id, scope.namespace, tokens, payload, sums)
    encoded = header.encode()
    value[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return PreparedBlock(header, value)


def merge_stored(
    scope: NamespaceScope, txn: Reader | Writer, block: PreparedBlock, stored: bytes, positions: int
) -> PreparedBlock | None:
    """Put the stored rows of a block's first `positions` positions into a prepared block: what was first saved stays.

    Reads the stored block, validating all of it. Returns the block with its new id, in the same
    buffer, or None when the stored block is damaged: it is refused from then on, and the prepared rows are as good.
    """
    layout, padded = scope.layout, block.header.padded_bytes
    environment = scope.store.environment
    try:
        ref = table.find(txn, stored)
        if ref is None:
            raise table.missing(stored)
        header = table.read_header(environment, stored, ref, len(layout.streams), scope.namespace)
        if header.tokens < positions or header.payload_bytes != layout.payload_bytes(header.tokens):
            raise BlockDamaged(f"block {stored.hex()} does not hold the rows that the index says")
    except (BlockDamaged, IndexDamaged):
        scope.store.refuse(stored, table.offset_of(txn, stored))
        return None
    offsets = layout.segments(block.header.tokens)
    payload = block.payload
    own = payload.copy()  # a failed check is noticed after the rows have moved
    segments = [
        payload[offsets[i] : offsets[i] + s.rows(block.header.tokens) * s.row_bytes]
        .view(s.view_dtype)
        .reshape(s.array_shape(block.header.tokens))
        for i, s in enumerate(layout.streams)
    ]
    rows = [
        rows_of(s, segment) if segment.size else Rows.skip(row_bytes=s.row_bytes, tokens_per_row=s.tokens_per_row)
        for segment, s in zip(segments, layout.streams, strict=True)
    ]
    restored = restore(
        environment.source,
        rows,
        np.array([ref.offset], np.uint64),
        np.zeros(1, np.int64),
        np.array([header.tokens], np.int64),
        np.array([positions], np.int64),
        header.sums.astype(np.uint32).reshape(1, -1),
        direct=np.zeros(1, np.uint8),
    )
    if restored is None or not restored.sound:
        payload[:] = own
        scope.store.refuse(stored, ref.offset)
        return None
    sums = np.array([crc32c(segment) for segment in segments], np.uint32)
    merged = _finish(scope, KIND_ROWS, block.header.tokens, block.value, padded, block.header.payload_bytes, sums)
    merged.merged = positions
    return merged


def release(scope: NamespaceScope, prepared: Iterable[PreparedBlock]) -> None:
    """Give the buffers of blocks back that nobody looks at any more."""
    for block in prepared:
        scope.store.pool.give(block.value)
