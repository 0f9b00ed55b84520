"""How arrays have to look for a layout, and the hash that compares two engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import DTYPES, Layout, State, Stream, state_hash
from kvstore.errors import ArrayError
from kvstore.testing import session_rows, session_states
from tests.support import hybrid_layout


@pytest.mark.parametrize("label", sorted(DTYPES))
def test_bytes_of_a_row_are_those_of_its_view(label: str) -> None:
    """For every dtype label the bytes of a row are those of the numpy array that stands for it."""
    dtype = DTYPES[label]
    stream = Stream("s", label, (3, 2 * dtype.group))
    array = np.zeros(stream.array_shape(5), stream.view_dtype)
    assert array.nbytes == 5 * stream.row_bytes == 5 * 3 * 2 * dtype.group_bytes
    stream.check_array(array, 5)


@pytest.mark.parametrize(
    ("label", "group_bytes"),
    [("q4_0", 18), ("q4_1", 20), ("q5_0", 22), ("q5_1", 24), ("q8_0", 34), ("q8_1", 36), ("iq4_nl", 18), ("mxfp4", 17)],
)
def test_quantised_groups_have_ggml_sizes(label: str, group_bytes: int) -> None:
    """32 elements of a quantised label take what ggml's block of that type takes."""
    assert (DTYPES[label].group, DTYPES[label].group_bytes) == (32, group_bytes)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_token_axis_may_be_any(axis: int) -> None:
    """The token axis is inserted where the stream says."""
    shape = Stream("s", "f32", (3, 4), axis).array_shape(7)
    assert shape[axis] == 7
    assert tuple(n for i, n in enumerate(shape) if i != axis) == (3, 4)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_strided_rows_exist_for_completed_spans(tokens: int, rows: int) -> None:
    """A stream of one row for four positions has floor(tokens / 4) rows."""
    stream = Stream("s", "f32", (2,), 0, 4)
    assert stream.rows(tokens) == rows
    assert stream.array_shape(tokens) == (rows, 2)


STREAM = Stream("kv", "f16", (3, 8), 1)
GOOD = np.zeros((3, 5, 8), np.float16)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 4, 8), np.float16), [r"\(3, 5, 8\)", r"\(3, 4, 8\)", "5 tokens"]),
        (np.zeros((3, 6, 8), np.float16), [r"\(3, 6, 8\)"]),
        (np.zeros((5, 3, 8), np.float16), [r"\(5, 3, 8\)"]),
        (np.zeros((3, 5, 9), np.float16), [r"\(3, 5, 9\)"]),
        (np.zeros((3, 40), np.float16), [r"\(3, 40\)"]),
        (np.zeros((3, 5, 8), np.float32), ["f16", "float32"]),
        (np.zeros((3, 5, 8), np.uint16), ["f16", "uint16"]),
        (np.zeros((3, 5, 8), ">f2"), ["f16", ">f2"]),
        (GOOD.tolist(), ["list"]),
        (None, ["NoneType"]),
    ],
)
def test_a_misfit_names_the_stream_what_came_and_what_was_expected(array: Any, said: list[str]) -> None:
    """An array of another shape, rank, dtype, byte order or type is refused with the stream's name and both sides."""
    with pytest.raises(ArrayError, match="'kv'") as caught:
        STREAM.check_array(array, 5)
    for text in said:
        assert caught.match(text)


def test_a_longer_array_will_do_as_a_destination_only() -> None:
    """A destination may be longer along the token axis, not along another; a source has to fit exactly."""
    STREAM.check_array(np.zeros((3, 9, 8), np.float16), 5, exact=False)
    with pytest.raises(ArrayError):
        STREAM.check_array(np.zeros((3, 9, 8), np.float16), 5)
    with pytest.raises(ArrayError):
        STREAM.check_array(np.zeros((4, 9, 8), np.float16), 5, exact=False)


@pytest.mark.parametrize(("shape", "fits"), [((3, 7), True), ((3, 0), True), ((3, 8), False), ((2, 7), False), ((3,), False)])
def test_bounded_axes_may_be_shorter(shape: tuple[int, ...], fits: bool) -> None:
    """A bounded axis takes any extent up to its own, 0 included; the others take theirs only."""
    state = State("w", "f16", (3, 7), (1,))
    assert state.fits(shape) is fits
    if fits:
        state.check_array(np.zeros(shape, np.float16))
    else:
        with pytest.raises(ArrayError, match="'w'"):
            state.check_array(np.zeros(shape, np.float16))


def parts(layout: Layout, tokens: list[int]) -> dict[str, Any]:
    """Give all arrays of a made-up session."""
    return {**session_rows(layout, tokens), **session_states(layout, tokens)}


def test_the_state_hash_names_the_part_that_differs() -> None:
    """One changed byte in one stream or state changes the hash of that part and of no other."""
    layout, tokens = hybrid_layout(), list(range(40))
    whole = state_hash(layout, parts(layout, tokens), 40)
    assert whole == state_hash(layout, parts(layout, tokens), 40)
    for name, array in parts(layout, tokens).items():
        changed = parts(layout, tokens)
        changed[name] = array.copy()
        changed[name].reshape(-1).view(np.uint8)[-1] ^= 1
        assert whole.differing(state_hash(layout, changed, 40)) == (name,)
    assert whole.differing(state_hash(layout, parts(layout, tokens), 39)) == ("length",)
    assert str(whole).startswith("length=40 k=")
    assert "\n" not in str(whole)


def test_the_state_hash_covers_rows_below_the_length_only() -> None:
    """What lies behind the length, as in an engine's own longer arrays, does not count; strides don't either."""
    layout, tokens = hybrid_layout(), list(range(40))
    arrays = parts(layout, tokens)
    longer = {**arrays, "k": np.concatenate([arrays["k"], np.ones((2, 9, 6), np.uint16)], axis=1)}
    longer["v"] = np.asfortranarray(arrays["v"])
    assert state_hash(layout, longer, 40) == state_hash(layout, arrays, 40)


def test_the_state_hash_tells_shapes_apart() -> None:
    """A bounded state of other extent but the same bytes has another hash."""
    layout = Layout((), (State("w", "u8", (4, 4), (0, 1)),))
    one, other = np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8)
    assert state_hash(layout, {"w": one}, 5).differing(state_hash(layout, {"w": other}, 5)) == ("w",)


@pytest.mark.parametrize("change", ["missing", "unknown", "short", "dtype"])
def test_the_state_hash_wants_every_part(change: str) -> None:
    """A part left out, an unknown one or one that doesn't fit is refused: leaving out is what the hash is there to find."""
    layout, tokens = hybrid_layout(), list(range(40))
    arrays = parts(layout, tokens)
    if change == "missing":
        del arrays["r"]
    elif change == "unknown":
        arrays["z"] = arrays["r"]
    elif change == "short":
        arrays["v"] = arrays["v"][:39]
    else:
        arrays["v"] = arrays["v"].astype(np.int16)
    with pytest.raises(ArrayError):
        state_hash(layout, arrays, 40)
