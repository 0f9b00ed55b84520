"""The layout and the kernel agree on where a payload's segments lie: the format is one, and both compute it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Layout, Stream, kernel
from kvstore.arrays import rows_of
from kvstore.layout import SEGMENT_ALIGN

STREAMS = st.lists(
    st.tuples(st.sampled_from(["f16", "u8", "f32", "i64"]), st.lists(st.integers(1, 5), max_size=3), st.sampled_from([1, 2, 4])),
    min_size=1,
    max_size=5,
)


def test_the_alignment_is_one() -> None:
    """The constant that is on disk has the same value in the layout and in C."""
    assert kernel.SEGMENT_ALIGN == SEGMENT_ALIGN


@given(STREAMS, st.integers(0, 70), st.data())
def test_payloads_are_as_long(parts: list[tuple[str, list[int], int]], tokens: int, data: st.DataObject) -> None:
    """A payload has the same length for the layout and for the kernel, whatever the streams and however many tokens."""
    streams = []
    for n, (dtype, shape, per_row) in enumerate(parts):
        axis = data.draw(st.integers(0, len(shape)))
        streams.append(Stream(str(n), dtype, tuple(shape), axis, per_row))
    layout = Layout(tuple(streams), block_tokens=64)
    rows = [rows_of(s, np.zeros(s.array_shape(64), s.view_dtype)) for s in layout.streams]
    assert kernel.payload_bytes(rows, tokens) == layout.payload_bytes(tokens)
