"""Ranges: a lease copied piece by piece is the lease copied whole."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import Layout, Paged, Store, Stream
from kvstore.errors import ArrayError, BlockDamaged, LeaseClosedError
from kvstore.kernel import address_of
from kvstore.leases import Lease
from kvstore.testing import destination, session_rows
from tests.support import CAP, data_file, examples, flip, plain_layout, save

Array = npt.NDArray[Any]
TOKENS = list(range(100))
_FILL = 0xA5


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Streams of any shapes, token axes and spans."""
    streams = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        kind, per_row = draw(st.sampled_from(["u8", "f16", "f32"])), draw(st.sampled_from([1, 1, 2, 8]))
        streams.append(Stream(f"s{number}", kind, shape, draw(st.integers(0, len(shape))), per_row))
    return Layout(tuple(streams), block_tokens=draw(st.sampled_from([8, 16, 40])), model="ranges")


def rows_of_range(stream: Stream, whole: Array, start: int, stop: int) -> Array:
    """The rows of completed spans in [start, stop), cut out of all rows."""
    return np.take(whole, range(start // stream.tokens_per_row, stop // stream.tokens_per_row), axis=stream.token_axis)


def assert_rows(stream: Stream, got: Array, expected: Array) -> None:
    """Require the rows from index 0 on, and nothing touched behind them."""
    count = expected.shape[stream.token_axis]
    rows = np.moveaxis(got, stream.token_axis, 0)
    assert (
        np.ascontiguousarray(rows[:count]).tobytes() == np.ascontiguousarray(np.moveaxis(expected, stream.token_axis, 0)).tobytes()
    )
    assert set(np.ascontiguousarray(rows[count:]).tobytes()) <= {_FILL}


def _paged(stream: Stream, tokens: int, random: Any) -> Paged:
    """Pages with room for these positions, in any order of slots."""
    per_page, count = random.randint(1, 5), stream.rows(tokens)
    pages = -(-count // per_page) + 1
    shape, axis = stream.array_shape(0), stream.token_axis
    array = np.zeros((*shape[:axis], pages, per_page, *shape[axis + 1 :]), stream.view_dtype)
    return Paged(array, np.array(random.sample(range(pages * per_page), count), random.choice([np.int32, np.int64])))


def _flat(stream: Stream, paged: Paged) -> Array:
    """Read the rows back out of pages, in the order of their slots, without the kernel."""
    shape, axis = paged.pages.shape, stream.token_axis
    joined = paged.pages.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return np.take(joined, paged.slots, axis=axis)


def _same_as_slices(lease: Lease, layout: Layout, data: st.DataObject) -> None:
    length, step = lease.length, layout.block_tokens
    start = step * data.draw(st.integers(0, length // step), "start block")
    stop = data.draw(st.integers(start, length), "stop")
    whole = destination(layout, length)
    lease.copy_into(whole)
    way = data.draw(st.sampled_from(["arrays", "pages", "thread"]), "way")
    if way == "pages":
        random = data.draw(st.randoms(use_true_random=False))
        paged = {stream.name: _paged(stream, stop - start, random) for stream in layout.streams}
        lease.copy_into(paged, start=start, stop=stop)
        for stream in layout.streams:
            assert_rows(stream, _flat(stream, paged[stream.name]), rows_of_range(stream, whole[stream.name], start, stop))
        return
    into = destination(layout, stop - start, spare=data.draw(st.integers(0, 9), "spare"), fill=_FILL)
    if way == "thread":
        lease.start_copy(into, start=start, stop=stop).finish()
    else:
        lease.copy_into(into, start=start, stop=stop, threads=data.draw(st.integers(1, 3), "threads"))
    for stream in layout.streams:
        assert_rows(stream, into[stream.name], rows_of_range(stream, whole[stream.name], start, stop))


def test_a_range_is_a_slice_of_the_whole(tmp_path: Path) -> None:
    """Whatever layout and range: what is copied is that slice of a whole copy, from index 0 on, and nothing beside it."""

    @given(layouts(), st.integers(1, 130), st.data())
    def check(layout: Layout, length: int, data: st.DataObject) -> None:
        tokens = [n % 11 for n in range(length)]
        with Store.open(tmp_path / "s") as store:
            namespace = store.namespace(layout)
            save(namespace, tokens)
            with namespace.lease(tokens[: data.draw(st.integers(1, length), "leased")]) as lease:
                for _ in range(3):
                    _same_as_slices(lease, layout, data)
            namespace.evict()

    Store.open(tmp_path / "s", max_bytes=CAP).close()
    settings(max_examples=examples(40))(check)()


@pytest.mark.parametrize("step", [16, 48, 100])
def test_pieces_make_the_whole(store: Store, step: int) -> None:
    """A session restored piece by piece through one small buffer is the session, and is counted once."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    before = store.stats().counters.restored_bytes
    buffer = destination(layout, step)
    pieces: dict[str, list[Array]] = {stream.name: [] for stream in layout.streams}
    with namespace.lease(TOKENS) as lease:
        for start in range(0, 100, step):
            stop = min(start + step, 100)
            lease.copy_into(buffer, start=start, stop=stop)
            for stream in layout.streams:
                pieces[stream.name].append(np.take(buffer[stream.name], range(stream.rows(stop - start)), axis=stream.token_axis))
    for stream in layout.streams:
        joined = np.concatenate(pieces[stream.name], axis=stream.token_axis)
        assert joined.tobytes() == session_rows(layout, TOKENS)[stream.name].tobytes()
    assert store.stats().counters.restored_bytes - before == sum(s.rows(100) * s.row_bytes for s in layout.streams)


@pytest.mark.parametrize("way", ["here", "thread"])
def test_damage_is_met_in_the_range_only(store: Store, way: str) -> None:
    """A damaged block fails the ranges that have rows of it, also where the byte lies behind their stop, and no others."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        at = lease.blocks[3].file_offset + layout.segments(16)[1] + 79  # the last position of stream v
        flip(data_file(store.path), at)
        into = destination(layout, 100)
        named = {"v": into["v"]}

        def copy(start: int, stop: int) -> None:
            if way == "thread":
                lease.start_copy(named, start=start, stop=stop).finish()
            else:
                lease.copy_into(named, start=start, stop=stop)

        for start, stop in [(0, 48), (64, 100), (48, 48), (0, 10)]:
            copy(start, stop)
        lease.copy_into({"k": into["k"], "t": into["t"]})  # other streams of that block are whole
        for start, stop in [(0, 100), (48, 64), (48, 49), (32, 50), (48, 100)]:
            with pytest.raises(BlockDamaged, match="'v'") as caught:
                copy(start, stop)
            assert caught.value.position == 48
    assert store.stats().counters.damaged_blocks == 1
    flip(data_file(store.path), at)


@pytest.mark.parametrize(
    ("start", "stop"), [(1, 20), (8, None), (-16, 16), (0, 101), (0, -1), (32, 16), (112, None), (112, 112), (96, 101), (100, 100)]
)
def test_a_range_that_is_none_is_refused(store: Store, start: int, stop: int | None) -> None:
    """A range that doesn't start at a block or leaves the lease is refused with what was expected, before a byte moves."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    into = destination(plain_layout(), 120)
    with namespace.lease(TOKENS) as lease:
        for copy in (lease.copy_into, lease.start_copy):
            with pytest.raises(ArrayError, match=r"within \[0, 100\).*multiple of 16"):
                copy(into, start=start, stop=stop)
    assert all(set(array.tobytes()) == {_FILL} for array in into.values())
    with pytest.raises(LeaseClosedError):
        lease.copy_into(into, start=16)


def test_arrays_too_short_for_a_range_are_refused(store: Store) -> None:
    """The arrays have to hold the rows of the range, no more and no less is asked of them."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    into = destination(plain_layout(), 36)
    with namespace.lease(TOKENS) as lease:
        with pytest.raises(ArrayError, match="37 tokens"):
            lease.copy_into(into, start=32, stop=69)
        with pytest.raises(ArrayError, match="a slot"):
            lease.copy_into({"v": Paged(np.zeros((9, 4, 5), np.uint8), np.arange(36))}, start=32, stop=69)
        lease.copy_into(into, start=64)
        lease.copy_into(into, start=32, stop=68)
        lease.copy_into({name: array[:0] if name == "v" else array for name, array in into.items()}, start=96, stop=96)


def test_arrays_that_come_again(store: Store) -> None:
    """Arrays that come again are taken for what they are by then: another shape, read-only, another one of that name."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    rows = session_rows(layout, TOKENS)
    into = destination(layout, 16)
    with namespace.lease(TOKENS) as lease:
        for start in (0, 16, 64):
            lease.copy_into(into, start=start, stop=start + 16)
            assert all(
                into[s.name].tobytes() == rows_of_range(s, rows[s.name], start, start + 16).tobytes() for s in layout.streams
            )
        lease.copy_into(into, start=96)
        assert into["v"][:4].tobytes() == rows["v"][96:].tobytes()
        with pytest.raises(ArrayError, match="16 tokens"):
            lease.copy_into({**into, "v": into["v"][:15]}, start=0, stop=16)
        other = {**into, "v": np.zeros_like(into["v"])}
        lease.copy_into(other, start=32, stop=48)
        assert other["v"].tobytes() == rows["v"][32:48].tobytes()
        lease.copy_into({"v": into["v"]}, start=32, stop=48)
        assert into["v"].tobytes() == rows["v"][32:48].tobytes()
        lease.copy_into(into, start=0, stop=16)
        into["v"].flags.writeable = False
        with pytest.raises(ArrayError, match=r"'v'.*read-only"):
            lease.copy_into(into, start=16, stop=32)
        into["v"].flags.writeable = True
        lease.copy_into(into, start=0, stop=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of later versions of numpy, in which one can do it still
            into["v"].shape = (5, 16)
        with pytest.raises(ArrayError, match="'v'"):
            lease.copy_into(into, start=16, stop=32)


def test_arrays_whose_memory_or_dtype_changes_in_place(store: Store) -> None:
    """An array that comes again is filled where it lies by then, and refused if its elements are others by then."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    rows = session_rows(plain_layout(), TOKENS)["v"]
    array = np.zeros((16, 5), np.uint8)
    with namespace.lease(TOKENS) as lease:
        lease.copy_into({"v": array}, start=0, stop=16)
        before = address_of(array)
        array.resize((1 << 20, 5), refcheck=False)  # so far that it can't stay
        taken = [np.zeros((16, 5), np.uint8) for _ in range(64)]  # among them what is at its place now
        array.resize((16, 5), refcheck=False)
        assert address_of(array) != before
        array[...] = 0
        lease.copy_into({"v": array}, start=16, stop=32)
        assert array.tobytes() == rows[16:32].tobytes()
        assert not any(one.any() for one in taken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as for shapes
            setattr(array, "dtype", np.dtype(np.int8))  # noqa: B010 (numpy's stubs know no assignment, which is why this is a test)
        with pytest.raises(ArrayError, match="'v'"):
            lease.copy_into({"v": array}, start=32, stop=48)


def test_slots_that_change_in_place(store: Store) -> None:
    """Pages whose slot table was changed in place are filled by what it says now."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    rows = session_rows(plain_layout(), TOKENS)["v"]
    slots = np.arange(16)
    paged = Paged(np.zeros((8, 4, 5), np.uint8), slots)
    with namespace.lease(TOKENS) as lease:
        lease.copy_into({"v": paged}, start=0, stop=16)
        slots += 16
        lease.copy_into({"v": paged}, start=16, stop=32)
    assert paged.pages.reshape(32, 5).tobytes() == rows[:32].tobytes()


def test_a_lease_that_ended_keeps_no_array(store: Store) -> None:
    """What a lease remembers of destinations goes with it."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    array = np.zeros((16, 5), np.uint8)
    gone = weakref.ref(array)
    with namespace.lease(TOKENS) as lease:
        lease.copy_into({"v": array}, start=0, stop=16)
        del array
    gc.collect()
    assert gone() is None
    assert lease.length == 100
