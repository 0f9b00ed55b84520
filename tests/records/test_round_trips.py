"""Every record comes back as it was written; anything else is a named error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import FormatVersionError, IndexDamaged, LayoutError
from kvstore.kernel import crc32c
from kvstore.records.block import BlockHeader, Ref
from kvstore.records.frame import frame, unframe
from kvstore.records.meta import Counters, NamespaceRecord, SaveRecord, StoreRecord, decode_format
from kvstore.records.node import Checkpoint, Node, Usage, decode_child, encode_child
from kvstore.records.states import pack_states, packed_states_bytes, unpack_states
from kvstore.testing import states_equal
from tests.layout.test_layout import layouts
from tests.support import examples

from .examples import DECODERS, ENCODED, aligned, summed_again

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
ID = st.binary(min_size=32, max_size=32)
NAMES = sorted(DECODERS)


@st.composite
def node_records(draw: st.DrawFn) -> Node:
    """Nodes of any shape."""
    tokens = draw(st.lists(U32, min_size=1, max_size=30))
    start = draw(st.integers(0, (1 << 31)))
    positions = st.integers(start + 1, start + len(tokens))
    joined = st.lists(ID, max_size=3).map(b"".join)
    checkpoints = draw(st.lists(st.builds(Checkpoint, positions, U64, st.booleans(), U64, joined), max_size=3))
    return Node(
        draw(U64),
        draw(U64),
        draw(U64),
        start,
        start + len(tokens),
        np.array(tokens, "<u4").tobytes(),
        draw(joined),
        draw(st.one_of(st.just(b""), ID)),
        tuple(sorted(checkpoints, key=lambda c: (c.position, c.save_id))),
    )


@given(node_records())
@settings(max_examples=examples(150))
def test_nodes(node: Node) -> None:
    """A node with any tokens, blocks, tail and checkpoints comes back whole, and counts each of its references."""
    assert Node.decode(node.node, node.encode()) == node
    assert len(node.referenced()) == len(node.blocks) // 32 + bool(node.tail) + sum(len(c.ids) for c in node.checkpoints)


@given(st.binary(min_size=16, max_size=16), U64, U64, U32, U64, ID, st.binary(max_size=50))
@settings(max_examples=examples(50))
def test_records_of_the_store(store_id: bytes, a: int, b: int, c: int, d: int, key: bytes, layout: bytes) -> None:
    """The store's identity, its counters, a namespace's record and the note of a save come back whole."""
    store = StoreRecord(store_id, a, b, c, d)
    assert StoreRecord.decode(store.encode()) == store
    assert Counters.decode(Counters(a, b).encode()) == Counters(a, b)
    namespace = NamespaceRecord(key, a, b, key[::-1], layout)
    assert NamespaceRecord.decode(key, namespace.encode()) == namespace
    save = SaveRecord(a, b, c, c, d, store_id)
    assert SaveRecord.decode(SaveRecord.key_of(a), save.encode()) == save


@given(U64, U32, U64, ID, U32, U64, U32)
@settings(max_examples=examples(50))
def test_small_records(node: int, count: int, last_use: int, block: bytes, pages: int, offset: int, tokens: int) -> None:
    """Children, usage and references come back whole."""
    assert decode_child(block[:12], encode_child(block[:12], node)) == node
    assert Usage.decode(node, Usage(last_use, count).encode(node)) == Usage(last_use, count)
    ref = Ref(count, 2, pages, offset, last_use, tokens)
    assert Ref.decode(block, ref.encode(block)) == ref


def test_a_use_count_saturates() -> None:
    """A count beyond 32 bits is stored as the most that fits."""
    assert Usage.decode(1, Usage(5, 1 << 40).encode(1)) == Usage(5, (1 << 32) - 1)


@given(st.integers(0, 255), ID, ID, st.integers(0, 1 << 16), U64, st.lists(U32, max_size=40))
@settings(max_examples=examples(50))
def test_headers(kind: int, block: bytes, namespace: bytes, tokens: int, payload: int, sums: list[int]) -> None:
    """A block's header with any number of checksums comes back whole, whatever bytes lie behind it."""
    header = BlockHeader(kind, block, namespace, tokens, payload, np.array(sums, np.uint32))
    raw = header.encode()
    assert len(raw) == BlockHeader.encoded_bytes(len(sums))
    found = BlockHeader.decode(raw + b"\xff" * 20)
    assert (found.kind, found.block_id, found.namespace, found.tokens, found.payload_bytes) == (
        kind,
        block,
        namespace,
        tokens,
        payload,
    )
    assert found.sums.tolist() == sums


@given(layouts(), st.data())
@settings(max_examples=examples(80))
def test_states(layout: Any, data: st.DataObject) -> None:
    """States of any shapes that their bounds allow, empty ones too, come back byte for byte."""
    states = {}
    for state in layout.states:
        shape = tuple(data.draw(st.integers(0, n)) if axis in state.bounded else n for axis, n in enumerate(state.array_shape))
        size = int(np.prod(shape)) * state.view_dtype.itemsize
        states[state.name] = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), state.view_dtype).reshape(shape)
    packed = b"".join(run.tobytes() for run in pack_states(layout, states))
    assert len(packed) == packed_states_bytes(layout, states)
    assert states_equal(unpack_states(layout, aligned(packed)), states)


@given(st.integers(0, 255), st.binary(max_size=20), st.binary(max_size=30))
@settings(max_examples=examples(100))
def test_an_envelope_is_of_one_type_and_key(kind: int, key: bytes, body: bytes) -> None:
    """A framed record opens under its own type and key, and under no other."""
    raw = frame(kind, key, body)
    assert raw[unframe(kind, key, raw) :] == body
    for other_kind, other_key in ((kind ^ 1, key), (kind, key + b"x"), (kind, key[:-1] if key else b"y")):
        with pytest.raises(IndexDamaged):
            unframe(other_kind, other_key, raw)


def test_a_record_of_another_key_is_not_taken() -> None:
    """A whole record that a damaged page hands back under another key is refused."""
    with pytest.raises(IndexDamaged, match="asked for"):
        Node.decode(8, ENCODED["node"])
    with pytest.raises(IndexDamaged, match="asked for"):
        Usage.decode(8, ENCODED["usage"])
    with pytest.raises(IndexDamaged):
        Node.decode(9, ENCODED["usage"])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("states", "layout")])
def test_every_flipped_bit_is_noticed(name: str) -> None:
    """No single changed bit of a record passes (packed states and layouts are covered by a header and a record around them)."""
    raw = ENCODED[name]
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IndexDamaged):
            DECODERS[name](bytes(changed))


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_noticed(name: str) -> None:
    """A record cut short anywhere, or with a byte too many, is refused by name, even if its checksum is made right again."""
    raw = ENCODED[name]
    lengths = [*range(len(raw)), len(raw) + 1]
    if name == "header":
        lengths.pop()  # it is read from the front of a longer value
    for length in lengths:
        cut = raw[:length] + b"\0" * max(length - len(raw), 0)
        for tried in (cut, summed_again(name, cut) if len(cut) >= 4 else cut):
            with pytest.raises((IndexDamaged, LayoutError, FormatVersionError)):
                DECODERS[name](tried)


def test_another_format_is_named() -> None:
    """A newer or older version of the format is refused with both numbers and what to do."""
    for version, text in ((2, "format 2, this code reads format 1: upgrade"), (0, "format 0, .*new store")):
        body = b"kvstore\0" + version.to_bytes(4, "little")
        with pytest.raises(FormatVersionError, match=text):
            decode_format(body + crc32c(body).to_bytes(4, "little"))
