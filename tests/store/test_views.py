"""Views: read-only, never other bytes than those that were leased, however long they live."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Namespace, Store
from kvstore.errors import ArrayError, LeaseClosedError, SpacePinned, StoreFullError, ViewsAliveError
from kvstore.testing import destination, session_rows
from tests.support import CAP, assert_restores, assert_sound, data_file, hybrid_layout, plain_layout, save, wide_layout

TOKENS = list(range(100))


def test_views_are_the_rows_without_a_copy(store: Store) -> None:
    """A stream's views, one for each block, are its rows in order, read-only, and payloads lie on 4 KiB boundaries."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    rows = session_rows(plain_layout(), TOKENS)
    with namespace.lease(TOKENS[:90]) as lease:
        assert bool(lease)
        assert [b.start for b in lease.blocks] == list(range(0, 90, 16))
        assert [b.tokens for b in lease.blocks] == [16] * 5 + [10]
        assert [b.held_tokens for b in lease.blocks] == [16] * 6
        for block in lease.blocks:
            assert block.file_offset % 4096 == 0
            assert block.payload.ctypes.data % 4096 == 0
            assert block.payload_bytes == block.payload.size == plain_layout().payload_bytes(16)
            with data_file(store.path).open("rb") as file:
                file.seek(block.file_offset)
                assert file.read(block.payload_bytes) == block.payload.tobytes()
        for stream in plain_layout().streams:
            views = lease.views(stream.name)
            assert all(not v.flags.writeable and v.dtype == stream.view_dtype for v in views)
            got = np.concatenate(views, axis=stream.token_axis)
            expected = np.take(rows[stream.name], range(stream.rows(90)), axis=stream.token_axis)
            assert got.tobytes() == expected.tobytes()
            with pytest.raises(ValueError, match="read-only"):
                views[0][...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                views[0].flags.writeable = True


def test_a_view_outlives_the_lease_and_the_store(path: Path) -> None:
    """A view read after its lease ended and after the store was closed still has the right bytes."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        with namespace.lease(TOKENS) as lease:
            views = lease.views("k")
        part = views[2][0, 3:5]
        del lease, namespace
    gc.collect()
    expected = session_rows(plain_layout(), TOKENS)["k"]
    assert np.concatenate(views, axis=1).tobytes() == expected.tobytes()
    del views
    gc.collect()
    assert part.tobytes() == expected[0, 35:37].tobytes()
    with Store.open(path) as store:  # in the same process, while a view of the earlier handle lives
        assert_restores(store.namespace(plain_layout()), TOKENS, 100)
    assert part.tobytes() == expected[0, 35:37].tobytes()


def fill(namespace: Namespace, rounds: int, first: int) -> int:
    """Save session after session until the space of the store has been written over; return how many went through."""
    done = 0
    for n in range(rounds):
        try:
            save(namespace, [first + n, *range(255)])
            done += 1
        except StoreFullError:
            break
    return done


def test_a_view_is_never_written_over(path: Path) -> None:
    """While a lease or a view of it lives, the store evicts and writes all it can around its bytes, which stay what they were."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, [1, *range(255)])
        expected = session_rows(wide_layout(), [1, *range(255)])["kv"]
        with namespace.lease([1, *range(255)]) as lease:
            views = lease.views("kv")
        namespace.evict()
        assert namespace.match([1, 0]) is None
        fill(namespace, 60, 1000)
        assert np.concatenate(views).tobytes() == expected.tobytes()
        del views, lease
        gc.collect()
        assert fill(namespace, 60, 2000) == 60  # the space has come back by itself
        assert_sound(store)


def test_a_lease_that_is_evicted_keeps_its_bytes(path: Path) -> None:
    """Evicting a leased prefix takes it from the index; the lease still copies it, validated."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, TOKENS)
        with namespace.lease(TOKENS) as lease:
            namespace.evict(TOKENS)
            assert namespace.match(TOKENS) is None
            save(namespace, [7] * 50)
            into = destination(hybrid_layout(), 100)
            lease.copy_into(into)
            lease.validate()
            assert into["k"].tobytes() == session_rows(hybrid_layout(), TOKENS)["k"].tobytes()
            assert lease.states()["r"].shape == (6, 5)
        assert_sound(store)


def test_a_reader_that_pins_is_named(path: Path) -> None:
    """When a lease pins what was freed, a save is refused as SpacePinned; nothing that is stored is lost for it."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        fill(namespace, 30, 0)
        lease = namespace.lease([29, *range(255)])
        assert store.stats().readers_pinning
        with pytest.raises(SpacePinned, match="lease") as caught:
            for n in range(200):
                save(namespace, [5000 + n, *range(255)])
        assert isinstance(caught.value, OSError)
        before = store.stats().nodes
        for n in range(5):
            with pytest.raises(SpacePinned):
                save(namespace, [6000 + n, *range(255)])
        assert store.stats().nodes == before  # refused saves evict nothing
        lease.close()
        assert fill(namespace, 20, 7000) == 20
        assert_sound(store)


def test_views_are_made_when_asked_for(store: Store) -> None:
    """The views of a stream are a sequence: by index, from behind, in slices, each the rows of its block; and it ends."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    with namespace.lease(TOKENS[:90]) as lease:
        for stream in layout.streams:
            views = lease.views(stream.name)
            expected = [block.stream(stream.name).tobytes() for block in lease.blocks]
            assert len(views) == 6
            assert [v.tobytes() for v in views] == [views[i].tobytes() for i in range(6)] == expected
            assert [v.tobytes() for v in views[4:]] == expected[4:]
            assert [v.tobytes() for v in views[::-2]] == expected[::-2]
            assert views[-1].tobytes() == expected[-1]
            assert views[-1].shape == stream.array_shape(10)
            for index in (6, -7):
                with pytest.raises(IndexError):
                    views[index]


def test_what_holds_a_lease_open(store: Store) -> None:
    """The transaction ends with the last of the sequence of views, a view made by it and a view of that, in any order."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    keep: list[Callable[[Any], Any]] = [lambda v: v, lambda v: v[3], lambda v: v[5][:2], lambda v: v[1].view(np.uint8), iter]
    for kept in keep:
        with namespace.lease(TOKENS) as lease:
            held = kept(lease.views("v"))
            if not hasattr(held, "__next__"):  # an iterator that wasn't begun holds the sequence, and is no array
                with pytest.raises(ViewsAliveError):
                    lease.close()
        gc.collect()
        assert store.stats().readers_pinning
        del held
        gc.collect()
        assert not store.stats().readers_pinning


def test_close_with_live_views_raises(store: Store) -> None:
    """An explicit close with live views raises BufferError and closes nothing; without them it ends the lease, twice at will."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    lease = namespace.lease(TOKENS)
    views = lease.views("v")
    with pytest.raises(BufferError, match="views") as caught:
        lease.close()
    assert isinstance(caught.value, ViewsAliveError)
    assert lease.views("v")[0].tobytes() == views[0].tobytes()
    del views
    lease.close()
    lease.close()
    with pytest.raises(LeaseClosedError):
        lease.validate()
    assert not store.stats().readers_pinning


def test_a_lease_that_ended_says_so(store: Store) -> None:
    """Every method of a lease that has ended raises LeaseClosedError; blocks taken from it too; its length can still be read."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        block = lease.blocks[0]
    uses: list[Callable[[], Any]] = [
        lambda: lease.blocks,
        lambda: lease.views("k"),
        lambda: lease.copy_into(destination(hybrid_layout(), 100)),
        lease.validate,
        lease.states,
        lease.__enter__,
        lambda: block.payload,
        lambda: block.stream("k"),
    ]
    for use in uses:
        with pytest.raises(LeaseClosedError, match="ended") as caught:
            use()
        assert isinstance(caught.value, ValueError)
    assert lease.length == 100


def test_a_lease_that_is_dropped_pins_nothing(store: Store) -> None:
    """A lease that is forgotten without a close ends with its last reference."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    lease = namespace.lease(TOKENS)
    assert store.stats().readers_pinning
    del lease
    gc.collect()
    assert not store.stats().readers_pinning


def test_a_miss_is_an_empty_lease(store: Store) -> None:
    """A miss is a lease of length 0, which is false, copies nothing and has no blocks."""
    namespace = store.namespace(hybrid_layout())
    with namespace.lease(TOKENS) as lease:
        assert not lease
        assert (lease.length, lease.tokens.size, list(lease.blocks), list(lease.views("k")), lease.states()) == (0, 0, [], [], {})
        into = destination(hybrid_layout(), 5)
        lease.copy_into(into)
        lease.validate()
        assert all(set(a.tobytes()) == {0xA5} for a in into.values())


@pytest.mark.parametrize("limit", [0, -1, 1, 15, 16, 17, 99, 100, 101, 10**9])
def test_the_limit_bounds_a_match(store: Store, limit: int) -> None:
    """No more than `limit` tokens are matched or leased, and a limit of none or less is a miss."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    expected = max(0, min(limit, 100))
    found = namespace.match(TOKENS, limit=limit)
    assert (0 if found is None else found.length) == expected
    with namespace.lease(TOKENS, limit=limit) as lease:
        assert lease.length == expected


def test_destinations_of_any_strides(store: Store) -> None:
    """Rows are scattered into arrays of any strides, longer ones too, and nothing beside them is touched."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    rows = session_rows(plain_layout(), TOKENS)
    spread = np.full((120, 11), 9, np.uint8)
    backwards = np.zeros((3, 100, 8), np.float16)[:, ::-1]
    with namespace.lease(TOKENS) as lease:
        lease.copy_into({"v": spread[:, 3:8], "k": backwards}, threads=2)
    assert spread[:100, 3:8].tobytes() == rows["v"].tobytes()
    assert set(spread[100:].tobytes()) | set(spread[:, :3].tobytes()) | set(spread[:, 8:].tobytes()) == {9}
    assert backwards.tobytes() == rows["k"].tobytes()


@pytest.mark.parametrize(
    "arrays",
    [
        {"nope": np.zeros((100, 5), np.uint8)},
        {"v": np.zeros((99, 5), np.uint8)},
        {"v": np.zeros((100, 6), np.uint8)},
        {"v": np.zeros((100, 5), np.int8)},
        {"v": np.zeros((100, 5), np.uint8).tolist()},
        {"v": np.broadcast_to(np.zeros(5, np.uint8), (100, 5))},
        {"v": np.frombuffer(bytes(500), np.uint8).reshape(100, 5)},
    ],
    ids=["unknown", "short", "wide", "dtype", "list", "overlapping", "read-only"],
)
def test_destinations_that_do_not_fit_are_refused(store: Store, arrays: dict[str, Any]) -> None:
    """A destination of the wrong name, shape, dtype or kind is refused by name before a byte moves, also beside good ones."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    good = destination(plain_layout(), 100)
    with namespace.lease(TOKENS) as lease:
        with pytest.raises(ArrayError, match=next(iter(arrays))):
            lease.copy_into({**good, **arrays})
        assert set(good["k"].tobytes()) == {0xA5}
        with pytest.raises(ArrayError, match="nope"):
            lease.views("nope")
