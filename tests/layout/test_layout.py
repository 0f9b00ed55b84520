"""What a layout is made of: its rule for block sizes, its encoding, its identity."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import DTYPES, Layout, State, Stream
from kvstore.errors import LayoutError
from kvstore.layout import SEGMENT_ALIGN
from tests.support import examples, hybrid_layout, plain_layout

LABELS = sorted(DTYPES)


@st.composite
def shapes(draw: st.DrawFn, label: str, least: int = 0) -> tuple[int, ...]:
    """Shapes that a dtype allows."""
    dtype = DTYPES[label]
    shape = draw(st.lists(st.integers(1, 5), min_size=max(least, int(dtype.packed)), max_size=4))
    if dtype.packed:
        shape[-1] *= dtype.group
    return tuple(shape)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of every kind that the format can express."""
    names = draw(st.lists(st.text("abc/-äö ", min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
    streams: list[Stream] = []
    states: list[State] = []
    for name in names:
        label = draw(st.sampled_from(LABELS))
        if draw(st.booleans()):
            shape = draw(shapes(label))
            last = len(shape) - (1 if DTYPES[label].packed else 0)
            streams.append(Stream(name, label, shape, draw(st.integers(0, last)), draw(st.sampled_from([1, 1, 2, 4, 6]))))
        else:
            shape = draw(shapes(label))
            bounded = draw(st.sets(st.integers(0, len(shape) - 1))) if shape else set()
            states.append(State(name, label, shape, tuple(bounded)))
    identity = draw(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=4), st.integers()), max_size=3))
    ranks = draw(st.integers(1, 8))
    return Layout(tuple(streams), tuple(states), draw(st.text(max_size=8)), identity, (draw(st.integers(0, ranks - 1)), ranks))


@given(layouts())
@settings(max_examples=examples(150))
def test_a_layout_survives_its_encoding(layout: Layout) -> None:
    """Decoding the canonical encoding gives back an equal layout with the same fingerprint."""
    decoded = Layout.decode(layout.canonical)
    assert decoded == layout
    assert decoded.canonical == layout.canonical
    assert decoded.fingerprint == layout.fingerprint
    assert hash(decoded) == hash(layout)


@given(layouts(), st.integers(0, 200))
@settings(max_examples=examples(100))
def test_segments_follow_each_other_aligned(layout: Layout, tokens: int) -> None:
    """The streams' segments lie one after the other on 64-byte boundaries, each with room for exactly its rows and padding."""
    offsets = layout.segments(tokens)
    assert offsets[0] == 0
    assert len(offsets) == len(layout.streams) + 1
    for stream, start, end in zip(layout.streams, offsets, offsets[1:], strict=False):
        size = stream.rows(tokens) * stream.row_bytes
        assert start % SEGMENT_ALIGN == 0
        assert size <= end - start < size + SEGMENT_ALIGN
    assert layout.payload_bytes(tokens) == offsets[-1]


@given(layouts())
@settings(max_examples=examples(100))
def test_the_default_block_follows_the_rule(layout: Layout) -> None:
    """A default block is a multiple of every stride, and otherwise the largest power of two from 16 to 512 of at most 4 MiB."""
    tokens = layout.block_tokens
    assert all(tokens % s.tokens_per_row == 0 for s in layout.streams)
    if all(s.tokens_per_row in (1, 2, 4) for s in layout.streams):
        assert tokens in (16, 32, 64, 128, 256, 512)
        assert tokens == 16 or layout.payload_bytes(tokens) <= 4 << 20
        assert tokens == 512 or layout.payload_bytes(2 * tokens) > 4 << 20


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(64, 512), (8192, 512), (8193, 256), (16 << 10, 256), (128 << 10, 32), (256 << 10, 16), (1 << 20, 16)],
)
def test_the_default_block_size_by_bytes_of_a_token(row_bytes: int, expected: int) -> None:
    """The default is 512 tokens up to 8 KiB a token, halves with each doubling, and never falls below 16."""
    assert Layout((Stream("kv", "u8", (row_bytes,)),)).block_tokens == expected


VARIANTS: dict[str, Layout] = {
    "plain": plain_layout(),
    "model": plain_layout(model="other"),
    "identity": plain_layout(identity={"revision": "a"}),
    "identity value": plain_layout(identity={"revision": "b"}),
    "identity type": plain_layout(identity={"revision": 1}),
    "identity string": plain_layout(identity={"revision": "1"}),
    "shard": plain_layout(shard=(0, 2)),
    "other shard": plain_layout(shard=(1, 2)),
    "block": plain_layout(block_tokens=32),
    "name": Layout((Stream("k2", "f16", (3, 8), 1),), block_tokens=16),
    "base": Layout((Stream("k", "f16", (3, 8), 1),), block_tokens=16),
    "dtype of the same size": Layout((Stream("k", "bf16", (3, 8), 1),), block_tokens=16),
    "shape of the same size": Layout((Stream("k", "f16", (8, 3), 1),), block_tokens=16),
    "axis": Layout((Stream("k", "f16", (3, 8), 0),), block_tokens=16),
    "stride": Layout((Stream("k", "f16", (3, 8), 1, 2),), block_tokens=16),
    "order a": Layout(
        (
            Stream("a", "u8", (4,)),
            Stream("b", "u8", (4,)),
        ),
        block_tokens=16,
    ),
    "order b": Layout(
        (
            Stream("b", "u8", (4,)),
            Stream("a", "u8", (4,)),
        ),
        block_tokens=16,
    ),
    "state": Layout((Stream("k", "f16", (3, 8), 1),), (State("s", "f32", (4,)),), block_tokens=16),
    "bounded state": Layout((Stream("k", "f16", (3, 8), 1),), (State("s", "f32", (4,), (0,)),), block_tokens=16),
    "state as stream": Layout(
        (
            Stream("k", "f16", (3, 8), 1),
            Stream("s", "f32", (4,)),
        ),
        block_tokens=16,
    ),
}


def test_whatever_differs_is_another_identity() -> None:
    """Layouts that differ in one thing each, sizes equal or not, have fingerprints of their own."""
    prints = {layout.fingerprint for layout in VARIANTS.values()}
    assert len(prints) == len(VARIANTS)


def test_the_order_of_an_identity_mapping_is_no_difference() -> None:
    """An identity given in another order is the same identity."""
    assert plain_layout(identity={"a": 1, "b": 2}).fingerprint == plain_layout(identity={"b": 2, "a": 1}).fingerprint


def _stream(**changes: Any) -> Stream:
    return Stream(**{"name": "k", "dtype": "f16", "row_shape": (3, 8), **changes})


LAYOUT: Any = Layout  # untyped, since what follows is wrong on purpose


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LAYOUT([_stream(), _stream()]), "'k'"),
        (lambda: LAYOUT([_stream()], [State("k", "f32", (1,))]), "'k'"),
        (lambda: LAYOUT([]), "at least one"),
        (lambda: LAYOUT([_stream(), "k"]), "Stream"),
        (lambda: LAYOUT([_stream()], [_stream(name="s")]), "State"),
        (lambda: LAYOUT([_stream()], model=b"m"), "model"),
        (lambda: LAYOUT([_stream()], identity={"a": 1.5}), "identity"),
        (lambda: LAYOUT([_stream()], identity={"a": True}), "identity"),
        (lambda: LAYOUT([_stream()], identity=[("a", 1), ("a", 2)]), "more than once"),
        (lambda: LAYOUT([_stream()], shard=(2, 2)), "rank"),
        (lambda: LAYOUT([_stream()], shard=(-1, 2)), "rank"),
        (lambda: LAYOUT([_stream()], shard=(0,)), "rank"),
        (lambda: LAYOUT([_stream()], block_tokens=-1), "block_tokens"),
        (lambda: LAYOUT([_stream()], block_tokens=65537), "block_tokens"),
        (lambda: LAYOUT([_stream(tokens_per_row=3)], block_tokens=16), "multiple"),
        (lambda: _stream(name=""), "name"),
        (lambda: _stream(name="a\n"), "name"),
        (lambda: _stream(name="a" * 201), "name"),
        (lambda: _stream(name=5), "name"),
        (lambda: _stream(dtype="float16"), "f16"),
        (lambda: _stream(dtype=None), "unknown dtype"),
        (lambda: _stream(row_shape=(0,)), "at least 1"),
        (lambda: _stream(row_shape=(-3,)), "at least 1"),
        (lambda: _stream(row_shape=(1,) * 8), "at most 7"),
        (lambda: _stream(row_shape=("a",)), "integers"),
        (lambda: _stream(row_shape=(1 << 41,)), "k"),
        (lambda: _stream(token_axis=3), "token_axis"),
        (lambda: _stream(token_axis=-1), "token_axis"),
        (lambda: _stream(tokens_per_row=0), "tokens_per_row"),
        (lambda: _stream(tokens_per_row=65537), "tokens_per_row"),
        (lambda: _stream(dtype="q8_0", row_shape=(33,)), "32"),
        (lambda: _stream(dtype="q8_0", row_shape=(32,), token_axis=1), "packs"),
        (lambda: State("s", "f32", (3,), (1,)), "bounded"),
        (lambda: State("s", "f32", (3,), (0, 0)), "bounded"),
        (lambda: State("s", "f32", (3,), (-1,)), "bounded"),
        (lambda: State("s", "f99", (3,)), "f99"),
    ],
)
def test_contradictions_are_refused_by_name(make: Any, text: str) -> None:
    """A layout that contradicts itself or is beyond the format raises LayoutError that names the part."""
    with pytest.raises(LayoutError, match=text):
        make()


@given(st.binary(max_size=300))
@settings(max_examples=examples(200))
def test_random_bytes_are_no_layout(raw: bytes) -> None:
    """Bytes that are not a layout raise LayoutError and nothing else."""
    with pytest.raises(LayoutError):
        Layout.decode(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "dtype", "shape", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from([plain_layout(), hybrid_layout()]), st.data())
@settings(max_examples=examples(300))
def test_a_changed_encoding_is_refused(layout: Layout, data: st.DataObject) -> None:
    """A well-formed encoding in which one value was replaced is either another valid layout or LayoutError, never a crash."""
    record = json.loads(layout.canonical)
    keys = sorted(record)
    key = data.draw(st.sampled_from(keys))
    value = data.draw(JSON)
    if key in ("streams", "states") and record[key] and data.draw(st.booleans()):
        part = record[key][0]
        part[data.draw(st.sampled_from(sorted(part)))] = value
    else:
        record[key] = value
    raw = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    try:
        decoded = Layout.decode(raw)
    except LayoutError:
        return
    assert decoded.canonical == raw


def test_an_encoding_that_is_not_canonical_is_refused() -> None:
    """The same record with a space in it is no layout: one layout has one encoding."""
    with pytest.raises(LayoutError, match="canonical"):
        Layout.decode(plain_layout().canonical.replace(b":", b": ", 1))


def test_a_layout_of_a_newer_version_is_refused_by_name() -> None:
    """A layout of another version says so and what to do."""
    with pytest.raises(LayoutError, match=r"version 2.*upgrade"):
        Layout.decode(plain_layout().canonical.replace(b'"version":1', b'"version":2'))
