"""Paged arrays: rows that lie in pages, found through a slot mapping, as engines with a paged KV cache keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import Layout, Paged, Store, Stream
from kvstore.errors import ArrayError
from kvstore.testing import session_rows
from tests.support import CAP, examples

LAYOUT = Layout(
    (Stream("k", "f16", (3, 8), 1), Stream("v", "u8", (2, 5)), Stream("pool", "f32", (4,), 0, 4)), block_tokens=16, model="paged"
)
TOKENS = [t % 7 for t in range(75)]
Array = npt.NDArray[Any]


def pages_for(stream: Stream, pages: int, rows: int) -> Array:
    """Empty pages in which one would keep a stream."""
    shape = stream.array_shape(0)
    axis = stream.token_axis
    return np.zeros((*shape[:axis], pages, rows, *shape[axis + 1 :]), stream.view_dtype)


def flat(stream: Stream, pages: Array, slots: Array) -> Array:
    """Read the rows back, in the order of their slots, without the kernel."""
    axis = stream.token_axis
    shape = pages.shape
    joined = pages.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return np.take(joined, slots, axis=axis)


def scattered(stream: Stream, rows: Array, pages: Array, slots: Array) -> Paged:
    """Put rows into pages, without the kernel."""
    per_page = pages.shape[stream.token_axis + 1]
    source = np.moveaxis(rows, stream.token_axis, 0)
    target = np.moveaxis(pages, (stream.token_axis, stream.token_axis + 1), (0, 1))
    for row, slot in zip(source, slots, strict=True):
        target[slot // per_page, slot % per_page] = row
    return Paged(pages, slots)


@given(st.integers(1, 7), st.randoms(use_true_random=False), st.sampled_from([np.int32, np.int64]))
def _round_trip(directory: Path, per_page: int, random: Any, kind: type) -> None:
    rows = session_rows(LAYOUT, TOKENS)
    given_arrays = {}
    for stream in LAYOUT.streams:
        count = stream.rows(len(TOKENS))
        pages = pages_for(stream, -(-count // per_page) + 2, per_page)
        slots: Array = np.array(random.sample(range(pages.shape[stream.token_axis] * per_page), count), kind)
        given_arrays[stream.name] = scattered(stream, rows[stream.name], pages, slots)
    with Store.open(directory) as store:
        namespace = store.namespace(LAYOUT, salt=random.randbytes(8))
        namespace.save(TOKENS, given_arrays)
        with namespace.lease(TOKENS) as lease:
            whole = {s.name: np.zeros(s.array_shape(len(TOKENS)), s.view_dtype) for s in LAYOUT.streams}
            lease.copy_into(whole)
            for stream in LAYOUT.streams:
                assert whole[stream.name].tobytes() == rows[stream.name].tobytes()
                source = given_arrays[stream.name]
                into = Paged(np.zeros_like(source.pages), source.slots)
                lease.copy_into({stream.name: into})
                assert flat(stream, into.pages, source.slots).tobytes() == rows[stream.name].tobytes()
        namespace.evict()


def test_rows_in_pages_are_saved_and_restored(tmp_path: Path) -> None:
    """Rows saved out of pages come back into whole arrays and into pages, whatever the slots."""
    Store.open(tmp_path / "s", max_bytes=CAP).close()
    settings(max_examples=examples(15))(_round_trip)(tmp_path / "s")
    with Store.open(tmp_path / "s") as store:
        assert store.verify(deep=True).ok


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: Paged(p.pages, p.slots[:-1]), "a slot"),
        (lambda p: Paged(p.pages, p.slots.astype(np.float64)), "a slot"),
        (lambda p: Paged(p.pages, p.slots + 1000), "slots from"),
        (lambda p: Paged(p.pages, p.slots - 1000), "slots from"),
        (lambda p: Paged(p.pages[0], p.slots), "axes"),
        (lambda p: Paged(p.pages.astype(np.float32), p.slots), "dtype"),
        (lambda p: Paged(p.pages[:, :0], p.slots), "no rows"),
        (lambda p: Paged(p.pages, np.zeros_like(p.slots)), "distinct"),
    ],
)
def test_misfits_are_refused_by_name(tmp_path: Path, change: Any, expected: str) -> None:
    """Pages or slots that do not fit are refused with what came and what was expected, before a byte moves."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(LAYOUT)
        namespace.save(TOKENS, session_rows(LAYOUT, TOKENS))
        pages = pages_for(LAYOUT.streams[0], 20, 4)
        paged = change(Paged(pages, np.arange(len(TOKENS), dtype=np.int64)))
        with namespace.lease(TOKENS) as lease, pytest.raises(ArrayError, match=expected):
            lease.copy_into({"k": paged})
        assert not pages.any()
