"""What the wrapper refuses before a byte moves."""

from typing import Any, cast

import numpy as np
import pytest

from kvstore.kernel import Rows, gather, payload_bytes, scatter

from .oracle import Payloads


def rows_of(*arrays: np.ndarray[Any, Any], axis: int = 0, tokens_per_row: int = 1) -> list[Rows]:
    """Return rows along one axis of each array."""
    return [Rows.strided(a, axis=axis, tokens_per_row=tokens_per_row) for a in arrays]


def call(rows: list[Rows], **changed: Any) -> None:
    """Scatter two blocks of 16 tokens with some arguments changed, and require that the destinations are untouched."""
    first, tokens = np.array([0, 16]), np.array([16, 16])
    payloads = Payloads(rows, tokens)
    args: dict[str, Any] = {"payloads": payloads.addresses, "first": first, "tokens": tokens, "used": tokens}
    args["sums"] = np.zeros((2, len(rows)), np.uint32)
    before = [r._array.copy() for r in rows if r._array is not None]
    try:
        scatter(rows, **{**args, **changed})
    finally:
        for r, old in zip([r for r in rows if r._array is not None], before, strict=True):
            assert r._array is not None
            assert (r._array == old).all()


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"first": np.array([0, 17])}, ValueError, "beyond the 32 rows"),
        ({"first": np.array([-1, 16])}, ValueError, "first must not be negative"),
        ({"first": np.array([0, 2**63 - 1])}, ValueError, "beyond the 32 rows"),
        ({"used": np.array([16, 17])}, ValueError, "beyond|more than the 16 tokens"),
        ({"used": np.array([17, 1])}, ValueError, "more than the 16 tokens"),
        ({"used": np.array([16, -1])}, ValueError, "used must not be negative"),
        ({"tokens": np.array([16, 2**62])}, ValueError, "more than can be addressed"),
        ({"tokens": np.array([16, 16], np.int32)}, TypeError, "tokens must be an array of int64"),
        ({"tokens": [16, 16]}, TypeError, "tokens must be an array of int64, not list"),
        ({"first": np.array([0])}, ValueError, "first must have shape"),
        ({"first": np.array([8, 0])}, ValueError, "blocks overlap"),
        ({"payloads": np.array([0, 64], np.uint64)}, ValueError, "address"),
        ({"payloads": np.array([2**64 - 64, 64], np.uint64)}, ValueError, "address"),
        ({"payloads": np.array([64, 64])}, TypeError, "payloads must be an array of uint64"),
        ({"payloads": np.array([[64, 64]], np.uint64)}, ValueError, "payloads must have shape"),
        ({"sums": np.zeros((2, 2), np.uint32)}, ValueError, "sums must have shape"),
        ({"sums": np.zeros((2, 1), np.int64)}, TypeError, "sums must be an array of uint32"),
        ({"threads": 0}, ValueError, "threads must be from 1"),
        ({"threads": 1000}, ValueError, "threads must be from 1"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    """Each wrong argument is refused with what came and what was expected, and nothing has been written."""
    with pytest.raises(error, match=text):
        call(rows_of(np.ones((32, 3), np.uint8)), **changed)


def test_first_off_a_row() -> None:
    """A block must start at the start of a row."""
    with pytest.raises(ValueError, match="not a multiple of the 4 tokens"):
        call(rows_of(np.ones((32, 3), np.uint8), tokens_per_row=4), first=np.array([0, 18]))


def test_gather_beyond_the_array() -> None:
    """Gather reads nothing behind an array's last row, whichever stream is the short one."""
    rows = rows_of(np.ones((32, 3)), np.ones((31, 3)))
    tokens = np.array([16, 16])
    payloads = Payloads(rows, tokens)
    before = [view.copy() for view in payloads.views]
    with pytest.raises(ValueError, match="beyond the 31 rows"):
        gather(rows, payloads.addresses, np.array([0, 16]), tokens)
    with pytest.raises(ValueError, match="payloads overlap"):
        gather(rows, payloads.addresses[[0, 0]], np.array([0, 8]), tokens)
    with pytest.raises(ValueError, match="payloads overlap"):
        gather(rows, payloads.addresses[:1] + np.array([0, 64], np.uint64), np.array([0, 8]), tokens)
    assert all((view == old).all() for view, old in zip(payloads.views, before, strict=True))


def test_one_bad_destination_stops_all() -> None:
    """Where one stream of several can't be written, the sound ones before it are untouched as well."""
    read_only = np.ones((32, 3))
    read_only.setflags(write=False)
    slides = np.lib.stride_tricks.as_strided(np.ones(40), (32, 3), (8, 8), writeable=True)
    for bad, text in ((read_only, "read-only"), (slides, "overlaps itself"), (np.ones((31, 3)), "beyond the 31 rows")):
        with pytest.raises(ValueError, match=text):
            call(rows_of(np.ones((32, 3)), bad))
    short = Rows.paged(np.ones((4, 8, 3)), np.arange(31), axis=0)
    with pytest.raises(ValueError, match="beyond the 31 rows"):
        call([*rows_of(np.ones((32, 3))), short])


def test_payload_within_a_destination() -> None:
    """A payload that scatter would overwrite while it reads it is refused; one right beside the destination is taken."""
    memory = np.ones(4096, np.uint8)
    array = memory[1024:2048].reshape(32, 32)
    rows = rows_of(array)
    start = memory.ctypes.data
    for inside in (start + 1024, start + 1024 - 512 + 1, start + 2047):
        with pytest.raises(ValueError, match="payload 1 lies within the destination of stream 0"):
            call(rows, payloads=np.array([start + 2048 + 512, inside], np.uint64))
    sides = np.array([start + 512, start + 2048], np.uint64)
    call(rows, payloads=sides, used=np.zeros(2, np.int64))


def test_read_only_destination() -> None:
    """Scatter refuses an array that isn't writable; gather takes it."""
    array = np.ones((32, 3))
    array.setflags(write=False)
    rows = rows_of(array)
    assert not rows[0].writable
    with pytest.raises(ValueError, match="read-only"):
        call(rows)
    tokens = np.array([16])
    assert gather(rows, Payloads(rows, tokens).addresses, np.array([0]), tokens)[0, 0]
    array.setflags(write=True)
    call(rows, used=np.zeros(2, np.int64))
    array.setflags(write=False)  # whoever does it later is heard too
    with pytest.raises(ValueError, match="read-only"):
        call(rows)


@pytest.mark.parametrize(
    "array",
    [
        np.lib.stride_tricks.as_strided(np.ones(40), (32, 3), (8, 0), writeable=True),
        np.lib.stride_tricks.as_strided(np.ones(40), (32, 3), (8, 8), writeable=True),
        np.lib.stride_tricks.as_strided(np.ones(40), (32, 3), (0, 8), writeable=True),
    ],
)
def test_destination_that_overlaps_itself(array: np.ndarray[Any, Any]) -> None:
    """A destination in which two elements share memory is refused; as a source it is fine."""
    with pytest.raises(ValueError, match="overlaps itself"):
        call(rows_of(array))
    tokens = np.array([16])
    rows = rows_of(array)
    gather(rows, Payloads(rows, tokens).addresses, np.array([0]), tokens)


def test_destinations_that_overlap() -> None:
    """Streams whose destinations share memory are refused; ones that interleave without touching aren't."""
    both = np.ones((32, 2, 3), np.uint8)
    for _ in range(2):  # the second time from memory
        call(rows_of(both[:, 0], both[:, 1]), used=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="streams 0 and 2 overlap"):
        call(rows_of(both[:, 0], both[:, 1], both[:, 0, 1:]))
    with pytest.raises(ValueError, match="streams 0 and 1 overlap"):
        call(rows_of(both, both))


def test_slots() -> None:
    """Slots must be in range, integers, and distinct where they are written to."""
    pages = np.ones((4, 8, 3), np.uint8)
    good = np.arange(32)
    for bad, text in ((good - 1, "slot -1"), (good + 1, "slot 32")):
        with pytest.raises(ValueError, match=text):
            Rows.paged(pages, bad, axis=0)
    for wrong in (good.astype(np.float64), good.reshape(4, 8), list(range(32)), good.astype(np.uint64)):
        with pytest.raises(TypeError, match="slots must be"):
            Rows.paged(pages, wrong, axis=0)  # type: ignore[arg-type]
    twice = good.copy()
    twice[5] = 6
    rows = [Rows.paged(pages, twice, axis=0)]
    with pytest.raises(ValueError, match="distinct"):
        call(rows)
    gather(rows, Payloads(rows, np.array([16])).addresses, np.array([0]), np.array([16]))


def test_streams_in_one_pool_of_pages() -> None:
    """Two streams may lie in the same pages if their slots differ, and not otherwise."""
    pages = np.ones((8, 8, 3), np.uint8)
    slots = np.random.default_rng(0).permutation(64)
    apart = [Rows.paged(pages, slots[:32], axis=0), Rows.paged(pages, slots[32:], axis=0)]
    call(apart, used=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="streams 0 and 1 overlap"):
        call([apart[0], Rows.paged(pages, slots[31:63], axis=0)])


def test_slots_are_taken_as_they_were() -> None:
    """Changing a slot table afterwards doesn't change the rows made of it."""
    pages = np.arange(32, dtype=np.uint8).reshape(4, 8)
    slots = np.arange(32)
    rows = [Rows.paged(pages, slots, axis=0)]
    slots[:] = 10**9
    payloads = Payloads(rows, np.array([32]))
    gather(rows, payloads.addresses, np.array([0]), np.array([32]))
    assert payloads.views[0][:32].tolist() == list(range(32))


def test_frozen_slots_are_shared() -> None:
    """An int64 table that owns its memory and can't be written is used as it is by all streams; any other is copied."""
    pages, slots = np.ones((4, 8)), np.arange(32)
    copied = Rows.paged(pages, slots, axis=0)
    slots.setflags(write=False)
    shared = [Rows.paged(pages, slots, axis=0) for _ in range(2)]
    view = Rows.paged(pages, slots[:], axis=0)
    tables = [r._slots and r._slots.table for r in (copied, *shared, view)]
    assert [t is slots for t in tables] == [False, True, True, False]
    assert shared[0]._slots is shared[1]._slots


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Rows.strided(np.ones((2, 3)), axis=2), ValueError, "axis 2 is out of range"),
        (lambda: Rows.strided(np.ones((2, 3)), axis=-3), ValueError, "axis -3 is out of range"),
        (lambda: Rows.strided(np.ones(()), axis=0), ValueError, "axis 0 is out of range"),
        (lambda: Rows.paged(np.ones((2, 3)), np.arange(2), axis=1), ValueError, "axis 1 is out of range"),
        (lambda: Rows.strided(cast(Any, [1, 2]), axis=0), TypeError, "must be an ndarray, not list"),
        (lambda: Rows.strided(np.array([None]), axis=0), TypeError, "Python objects"),
        (lambda: Rows.strided(np.ones((2, 0)), axis=0), ValueError, "are empty"),
        (lambda: Rows.strided(np.ones((2, 2)), axis=0, tokens_per_row=0), ValueError, "tokens_per_row"),
        (lambda: Rows.strided(np.ones((2,) * 10).T, axis=0), ValueError, "axes besides"),
        (lambda: Rows.skip(row_bytes=0), ValueError, "row_bytes"),
        (lambda: Rows.skip(row_bytes=8, tokens_per_row=0), ValueError, "tokens_per_row"),
        (lambda: Rows(), TypeError, "use Rows.strided"),
        (lambda: payload_bytes([], -1), ValueError, "negative"),
        (lambda: gather(cast(Any, [1]), np.zeros(0, np.uint64), np.zeros(0, int), np.zeros(0, int)), TypeError, "Rows objects"),
    ],
)
def test_wrong_rows(make: Any, error: type[Exception], text: str) -> None:
    """Rows that mean nothing are refused when they are made."""
    with pytest.raises(error, match=text):
        make()


def test_rows_describe_themselves() -> None:
    """Rows tell their size, can't be changed, and keep their array alive."""
    rows = Rows.strided(np.ones((2, 32, 3), np.float16), axis=-2, tokens_per_row=4)
    assert (rows.row_bytes, rows.rows, rows.tokens_per_row, rows.writable, rows.skipped) == (12, 32, 4, True, False)
    assert repr(rows) == "<Rows strided: 32 rows of 12 bytes, 4 tokens each>"
    with pytest.raises(AttributeError):
        rows.row_bytes = 1  # type: ignore[misc]
