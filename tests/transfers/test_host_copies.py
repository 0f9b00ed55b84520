"""Copies into arrays on a thread of their own."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Layout, Namespace, Paged, Store, Stream
from kvstore.errors import ArrayError, BlockDamaged, LeaseClosedError, TransferCancelled
from kvstore.testing import destination, session_rows
from tests.support import CAP, assert_sound, data_file, flip, hybrid_layout, plain_layout, run_child, save, wait_until

TOKENS = list(range(300))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Make a store; it has to be sound in the end."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as opened:
        yield opened
        assert_sound(opened)


def assert_rows(layout: Layout, arrays: dict[str, Any], length: int) -> None:
    """Require the rows of a session, and nothing behind them."""
    expected = session_rows(layout, TOKENS[:length])
    for name, array in arrays.items():
        stream = next(s for s in layout.streams if s.name == name)
        rows = np.moveaxis(array, stream.token_axis, 0)
        wanted = np.moveaxis(expected[name], stream.token_axis, 0)
        assert rows[: len(wanted)].tobytes() == wanted.tobytes(), name
        assert set(np.ascontiguousarray(rows[len(wanted) :]).tobytes()) <= {0xA5}, name


@pytest.mark.parametrize("make", [plain_layout, hybrid_layout])
def test_all_streams(store: Store, make: Any) -> None:
    """Every stream can be waited for by name and has its rows then, also after the lease has ended; what is copied is counted."""
    layout = make()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    length = 300 if layout.states else 291
    arrays = destination(layout, length, spare=9)
    before = store.stats().counters.restored_bytes
    with namespace.lease(TOKENS[:length]) as lease:
        transfer = lease.start_copy(arrays)
    assert transfer.names == tuple(s.name for s in layout.streams)
    with transfer:
        for name in transfer.names:
            transfer.wait(name, 60)
            assert transfer.ready(name)
            assert_rows(layout, {name: arrays[name]}, length)
    assert_rows(layout, arrays, length)
    assert store.stats().counters.restored_bytes - before == sum(s.rows(length) * s.row_bytes for s in layout.streams)
    assert "done" in repr(transfer)
    transfer.cancel()  # too late to change anything
    transfer.finish()


def test_some_streams_in_pages(store: Store) -> None:
    """Streams may be left out, and rows go to pages as with copy_into."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    pages = np.zeros((20, 16, 5), np.uint8)
    slots = np.random.default_rng(1).permutation(320)[:300].astype(np.int64)
    with namespace.lease(TOKENS) as lease, lease.start_copy({"v": Paged(pages, slots)}) as transfer:
        assert transfer.names == ("v",)
        with pytest.raises(ArrayError, match="no stream 'k'"):
            transfer.wait("k")
    assert pages.reshape(320, 5)[slots].tobytes() == session_rows(layout, TOKENS)["v"].tobytes()


def test_refusals(store: Store) -> None:
    """What doesn't fit is refused at once, also destinations that overlap and would be written by different calls."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    room = np.zeros(8000, np.uint8)
    overlapping = {"v": room[:1500].reshape(300, 5), "t": room[1400:6200].view(np.float32).reshape(4, 300)}
    readonly = np.zeros((300, 5), np.uint8)
    readonly.flags.writeable = False
    with namespace.lease(TOKENS) as lease:
        cases: list[tuple[dict[str, Any], str]] = [
            (overlapping, "overlap"),
            ({"v": readonly}, "read-only"),
            ({"v": np.zeros((299, 5), np.uint8)}, "'v'"),
            ({"w": room}, "'w'"),
        ]
        for arrays, match in cases:
            with pytest.raises(ArrayError, match=match):
                lease.start_copy(arrays)
    assert not room.any()
    with pytest.raises(LeaseClosedError):
        lease.start_copy({})


def hurt(store: Store, namespace: Namespace, index: int, stream: int) -> int:
    """Damage a stream of a block; returns its position."""
    with namespace.lease(TOKENS) as lease:
        block = lease.blocks[index]
        offset, position = block.file_offset + namespace.layout.segments(16)[stream] + 1, block.start
        del block
    flip(data_file(store.path), offset)
    return position


def test_damage(store: Store) -> None:
    """A damaged block fails the transfer by name: for its own stream, for later ones, for early ones, and at the end."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    position = hurt(store, namespace, 7, 2)
    arrays = destination(namespace.layout, 300)
    with namespace.lease(TOKENS) as lease:
        transfer = lease.start_copy(arrays)
        for name in ("t", "pool", "k"):
            with pytest.raises(BlockDamaged) as caught:
                transfer.wait(name, 60)
            assert caught.value.position == position
        with pytest.raises(BlockDamaged):
            transfer.finish()
        with pytest.raises(BlockDamaged), lease.start_copy(arrays):
            pass
    assert namespace.lease(TOKENS).length == position
    save(namespace, TOKENS)


def test_a_failure_keeps_no_arrays(store: Store) -> None:
    """The arrays of a transfer that failed die with the function that made them; no collection needed."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    position = hurt(store, namespace, 3, 0)

    def attempt(lease: Any) -> tuple[Any, list[Any]]:
        arrays = destination(namespace.layout, 300)
        transfer = lease.start_copy(arrays)
        told = 0
        for ask in (transfer.finish, lambda: transfer.wait("k"), lambda: transfer.ready("v")):
            try:
                ask()
            except BlockDamaged as error:
                told += 1
                assert (error.position, len(error.block_id)) == (position, 32)
                assert "checksum" in str(error)
        transfer.cancel()  # its thread has ended
        assert told == 3
        return transfer, [weakref.ref(array) for array in arrays.values()]

    gc.collect()
    gc.disable()
    try:
        with namespace.lease(TOKENS) as lease:
            transfer, arrays = attempt(lease)
        assert "failed" in repr(transfer)
        assert len(arrays) == 4 and all(array() is None for array in arrays)
    finally:
        gc.enable()
    save(namespace, TOKENS)


def test_errors_that_nobody_asked_for(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The error of a transfer that was dropped is logged once, one that was told is not; one under way is cancelled."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    hurt(store, namespace, 3, 0)
    arrays = destination(namespace.layout, 300)
    lease = namespace.lease(TOKENS)
    transfer = lease.start_copy(arrays)
    with pytest.raises(BlockDamaged):
        transfer.finish(60)
    del transfer
    gc.collect()
    assert "nobody asked" not in caplog.text
    transfer = lease.start_copy({"k": arrays["k"]})
    wait_until(lambda failed=transfer: "failed" in repr(failed))
    del transfer
    gc.collect()
    assert caplog.text.count("nobody asked: BlockDamaged") == 1
    caplog.clear()
    lease.start_copy({"k": arrays["k"]})  # dropped at once: it is cancelled, unless it has come to the damage already
    wait_until(lambda: "it is cancelled" in caplog.text or "nobody asked: BlockDamaged" in caplog.text)
    with lease:  # which the transfer may still hold
        pass
    save(namespace, TOKENS)


def test_cancelling(store: Store) -> None:
    """After cancel nothing is written any more: either all is there, or waits say that it was cancelled."""
    layout = Layout(streams=tuple(Stream(f"s{i}", "u8", (512,)) for i in range(60)), block_tokens=16, model="many")
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    cancelled = 0
    for _ in range(40):
        arrays = destination(layout, 300)
        with namespace.lease(TOKENS) as lease:
            transfer = lease.start_copy(arrays, threads=1)
            transfer.cancel()
        now = {name: array.copy() for name, array in arrays.items()}
        try:
            transfer.finish()
            assert_rows(layout, arrays, 300)
        except TransferCancelled:
            cancelled += 1
            with pytest.raises(TransferCancelled):
                transfer.wait("s59")
        assert all((now[name] == arrays[name]).all() for name in arrays)
    assert cancelled
    with pytest.raises(KeyError), namespace.lease(TOKENS) as lease, lease.start_copy(arrays):
        raise KeyError("mine")
    lease.close()


def test_dropped_with_its_arrays(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Transfers that are dropped together with lease and arrays touch nothing that was freed, and let go of the lease."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS)
    with caplog.at_level(logging.ERROR, "kvstore"):
        for _ in range(50):
            namespace.lease(TOKENS).start_copy(destination(namespace.layout, 300))
    gc.collect()
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_a_miss(store: Store) -> None:
    """A transfer of nothing is done at once."""
    namespace = store.namespace(plain_layout())
    with namespace.lease(TOKENS) as lease, lease.start_copy(destination(plain_layout(), 0)) as transfer:
        transfer.wait("k", 60)
        assert all(transfer.ready(name) for name in transfer.names)
    save(namespace, TOKENS[:3])
    with namespace.lease(TOKENS) as lease, lease.start_copy({"pool": np.zeros((0, 2), np.float32)}) as transfer:
        transfer.wait("pool", 60)
        assert transfer.ready("pool")


def test_the_interpreter_ends(tmp_path: Path) -> None:
    """A process that ends in the middle of a transfer ends cleanly, the store as it was."""
    code = """
    store = Store.open(sys.argv[1], max_bytes=1 << 28)
    layout = Layout(streams=tuple(Stream(f"s{i}", "u8", (4096,)) for i in range(20)), block_tokens=64, model="m")
    namespace = store.namespace(layout)
    tokens = list(range(1000))
    namespace.save(tokens, {s.name: np.zeros(s.array_shape(1000), np.uint8) for s in layout.streams})
    transfer = namespace.lease(tokens).start_copy(destination(layout, 1000), threads=1)
    print(len(transfer.names))
    """
    assert run_child(code, tmp_path / "s") == "20"


def test_in_a_forked_child(store: Store) -> None:
    """In a forked child the parent's transfer can't be waited for, and says so."""
    code = """
    store = Store.open(sys.argv[1], max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    save(namespace, list(range(300)))
    transfer = namespace.lease(list(range(300))).start_copy(destination(plain_layout(), 300))
    pid = os.fork()
    if not pid:
        for call in (transfer.finish, transfer.cancel, lambda: transfer.wait("k")):
            try:
                call()
            except errors.ForkedStoreError:
                continue
            os._exit(1)
        os._exit(17)
    transfer.finish()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run_child(code, Path(store.path).parent / "other") == "17"
