"""Tokens in their one form."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import KVStoreError, as_tokens, image_tokens
from kvstore.errors import TokensError, TokensTypeError
from kvstore.ids import common_tokens


@pytest.mark.parametrize(
    "given_tokens",
    [
        [1, 2, 4294967295],
        (1, 2, 4294967295),
        np.array([1, 2, 4294967295], np.uint32),
        np.array([1, 2, 4294967295], np.int64),
        np.array([1, 2, 4294967295], np.uint64),
        np.array([1, 2, 4294967295], ">u4"),
        np.array([1, 7, 2, 7, 4294967295], np.uint32)[::2],
        [np.uint32(1), np.int64(2), np.uint32(4294967295)],
    ],
    ids=["list", "tuple", "uint32", "int64", "uint64", "big-endian", "strided", "scalars"],
)
def test_every_integer_form_becomes_the_same_array(given_tokens: Any) -> None:
    """Whatever integers a caller has, the same values become the same contiguous uint32 array."""
    tokens = as_tokens(given_tokens)
    assert tokens.dtype == np.uint32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [1, 2, 4294967295]
    assert tokens.astype("<u4").tobytes() == np.array([1, 2, 4294967295], "<u4").tobytes()


def test_a_fitting_array_is_not_copied() -> None:
    """A contiguous uint32 array comes back as it is, so that a long prompt costs nothing."""
    tokens = np.arange(10, dtype=np.uint32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([1, -1], TokensError, "-1"),
        (np.array([3, -7]), TokensError, "-7"),
        ([1, 1 << 32], TokensError, "4294967296"),
        (np.array([1 << 40], np.uint64), TokensError, str(1 << 40)),
        ([1 << 70], TokensError, "64 bits"),
        ([-(1 << 70)], TokensError, "64 bits"),
        ([[1, 2], [3, 4]], TokensError, "1-D"),
        (np.zeros((2, 2), np.uint32), TokensError, "1-D"),
        (np.uint32(4), TokensError, "1-D"),
        (5, TokensError, "1-D"),
        ([[1], [2, 3]], TokensError, "1-D"),
        ([], TokensError, "empty"),
        (np.zeros(0, np.uint32), TokensError, "empty"),
        ([1.0, 2.0], TokensTypeError, "float64"),
        (np.zeros(3, np.float32), TokensTypeError, "float32"),
        ([True, False], TokensTypeError, "bool"),
        (np.array([True]), TokensTypeError, "bool"),
        (["1", "2"], TokensTypeError, "integers"),
        ([1, None], TokensTypeError, "object"),
        ([object()], TokensTypeError, "object"),
        ("123", TokensError, "1-D"),
        (None, TokensError, "1-D"),
        (b"123", TokensError, "1-D"),
        ([1 + 2j], TokensTypeError, "complex"),
    ],
)
def test_what_is_no_token_array_is_refused_by_name(bad: Any, error: type[Exception], text: str) -> None:
    """Anything but a 1-D, non-empty run of integers in [0, 2**32) is refused, saying what came."""
    with pytest.raises(error, match=text) as caught:
        as_tokens(bad)
    assert isinstance(caught.value, KVStoreError)
    assert isinstance(caught.value, ValueError)


def test_a_wrong_type_is_a_type_error_too() -> None:
    """Who catches TypeError for wrong element types catches it here as well."""
    with pytest.raises(TypeError):
        as_tokens([1.5])  # type: ignore[list-item]


def test_a_bool_among_integers_is_refused() -> None:
    """A bool inside a list of integers is a mistake of the caller's and is not taken for 0 or 1 in an object array."""
    with pytest.raises(TokensTypeError):
        as_tokens(np.array([1, True], object))


@given(st.lists(st.integers(-(1 << 66), 1 << 66), max_size=6))
def test_any_list_of_integers_is_taken_whole_or_refused(values: list[int]) -> None:
    """A list of integers either comes through with every value as it was, or raises TokensError."""
    fits = bool(values) and all(0 <= v < 1 << 32 for v in values)
    if fits:
        assert as_tokens(values).tolist() == values
    else:
        with pytest.raises(TokensError):
            as_tokens(values)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_common_tokens_is_the_length_of_the_common_prefix(a: list[int], b: list[int]) -> None:
    """Two runs of tokens share exactly their longest common prefix."""
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(np.array(a, "<u4").tobytes(), np.array(b, "<u4").tobytes()) == expected


def test_images_enter_by_their_digest() -> None:
    """An image's ids are the same each time, fill all its positions, and another digest agrees in hardly any position."""
    one, again, other = image_tokens(b"a" * 32, 500), image_tokens(b"a" * 32, 500), image_tokens(b"a" * 31 + b"b", 500)
    assert one.dtype == np.uint32
    assert one.shape == (500,)
    assert np.array_equal(one, again)
    assert int((one == other).sum()) == 0
    assert len(set(one.tolist())) == 500
    assert as_tokens(one) is one


def test_an_image_of_another_count_shares_nothing() -> None:
    """The number of positions is part of an image's identity: the same picture at another resolution does not match."""
    assert int((image_tokens(b"a" * 32, 64) == image_tokens(b"a" * 32, 65)[:64]).sum()) == 0


@pytest.mark.parametrize(("digest", "count"), [(b"short", 4), (b"", 1), (b"a" * 32, 0), (b"a" * 32, -3)])
def test_images_that_cannot_be_told_apart_are_refused(digest: bytes, count: int) -> None:
    """A digest too short to be collision-resistant, and a count below one, are refused."""
    with pytest.raises(TokensError):
        image_tokens(digest, count)
