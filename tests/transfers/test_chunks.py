"""Chunks of a lease: each is right when it is handed out, while the next ones are copied."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import Chunk, HostBuffer, Layout, Namespace, Paged, Store
from kvstore.errors import ArrayError, BlockDamaged, LeaseClosedError, TransferCancelled
from kvstore.testing import session_rows
from tests.support import CAP, assert_sound, data_file, examples, flip, hybrid_layout, plain_layout, run_child, save, wait_until

TOKENS = list(range(300))
LENGTH = 291  # of a lease that ends inside a block, and inside a row of the stream with a row for four positions


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Make a store; it has to be sound in the end."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as opened:
        yield opened
        assert_sound(opened)


def buffer(layout: Layout, tokens: int) -> HostBuffer:
    """Arrays for so many positions, filled with something."""
    arrays = {s.name: np.full(s.array_shape(tokens), 7, s.view_dtype) for s in layout.streams}
    return HostBuffer(layout, arrays, tokens)


def cut(layout: Layout, length: int, step: int, buffers: int) -> list[Chunk]:
    """Chunks of a prefix, into so many buffers by turns."""
    ring = [buffer(layout, step) for _ in range(buffers)]
    starts = range(0, length, step)
    return [Chunk(start, min(start + step, length), ring[i % buffers]) for i, start in enumerate(starts)]


def assert_chunk(layout: Layout, chunk: Chunk, tokens: list[int] = TOKENS) -> None:
    """Require the rows of a chunk's positions, from index 0 of its arrays on."""
    expected = session_rows(layout, tokens)
    for stream in layout.streams:
        wanted = np.moveaxis(expected[stream.name], stream.token_axis, 0)[stream.rows(chunk.start) : stream.rows(chunk.stop)]
        array = chunk.buffer.arrays[stream.name]
        assert isinstance(array, np.ndarray)
        got = np.moveaxis(array, stream.token_axis, 0)[: len(wanted)]
        assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes(), (stream.name, chunk)


@given(
    make=st.sampled_from([plain_layout, hybrid_layout]),
    blocks=st.integers(1, 20),
    buffers=st.integers(1, 4),
    threads=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_is_right(store: Store, make: Any, blocks: int, buffers: int, threads: int | None, seed: int) -> None:
    """Whatever the chunks' size and the number of buffers: each holds its rows when it is handed out and until the next is asked
    for, and what was copied is counted.
    """
    layout = make()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    length = len(TOKENS) if layout.states else random.Random(seed).randrange(1, len(TOKENS) + 1)
    chunks = cut(layout, length, 16 * blocks, buffers)
    before = store.stats().counters.restored_bytes
    with namespace.lease(TOKENS[:length]) as lease, lease.chunks(chunks, ahead=buffers - 1, threads=threads) as filled:
        for number, chunk in enumerate(filled):
            assert chunk is chunks[number]
            assert_chunk(layout, chunk)
        assert list(filled) == []
    assert number == len(chunks) - 1
    assert store.stats().counters.restored_bytes - before == sum(s.rows(length) * s.row_bytes for s in layout.streams)


def test_a_part_of_it(store: Store) -> None:
    """Some streams, a range that begins and ends in the middle, chunks of different sizes, in pages; the lease ends before."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    pages = [np.zeros((20, 5, 5), np.uint8) for _ in range(2)]
    slots = np.random.default_rng(1).permutation(100)[:64].astype(np.int64)
    ring = [HostBuffer(layout, {"v": Paged(array, slots)}, 64) for array in pages]
    chunks = [Chunk(32, 48, ring[0]), Chunk(48, 112, ring[1]), Chunk(112, 170, ring[0])]
    with namespace.lease(TOKENS) as lease:
        filled = lease.chunks(chunks)
    expected = session_rows(layout, TOKENS)["v"]
    with filled:
        for number, chunk in enumerate(filled):
            count = chunk.stop - chunk.start
            assert pages[number % 2].reshape(100, 5)[slots[:count]].tobytes() == expected[chunk.start : chunk.stop].tobytes()


def test_nothing_but_names(store: Store) -> None:
    """Chunks of no stream, or of one that has no row in them, are handed out all the same."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    pool = next(s for s in layout.streams if s.name == "pool")  # a row for four positions
    for arrays in ({}, {"pool": np.full(pool.array_shape(4), 7, pool.view_dtype)}):
        with namespace.lease(TOKENS[:3]) as lease, lease.chunks([Chunk(0, 3, HostBuffer(layout, arrays, 3))]) as filled:
            assert [(chunk.start, chunk.stop) for chunk in filled] == [(0, 3)]
        assert all((array == 7).all() for array in arrays.values())


def hurt(store: Store, namespace: Namespace, index: int, stream: int) -> int:
    """Damage a stream of a block; returns its position."""
    with namespace.lease(TOKENS) as lease:
        block = lease.blocks[index]
        offset, position = block.file_offset + namespace.layout.segments(16)[stream] + 1, block.start
        del block
    flip(data_file(store.path), offset)
    return position


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_damage(store: Store, buffers: int) -> None:
    """A damaged block's chunk is never handed out: those before it are right, then its error is raised, again and again."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    position = hurt(store, namespace, 7, 2)
    chunks = cut(layout, 300, 32, buffers)
    got = []
    with namespace.lease(TOKENS) as lease, lease.chunks(chunks, ahead=buffers - 1) as filled:
        with pytest.raises(BlockDamaged) as caught:
            for chunk in filled:
                assert_chunk(layout, chunk)
                got.append(chunk.start)
        assert caught.value.position == position
        with pytest.raises(BlockDamaged):
            next(filled)
    assert got == [0, 32, 64]
    assert namespace.lease(TOKENS).length == position
    save(namespace, TOKENS)


def test_left_early(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Leaving the block ends the copying, whether by an error or not: nothing touches a buffer afterwards, nothing is pinned, and
    nothing is logged. What is asked for then is refused.
    """
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    for error in (None, ZeroDivisionError):
        chunks = cut(layout, 300, 16, 2)
        with pytest.raises(error or TransferCancelled):
            with namespace.lease(TOKENS) as lease, lease.chunks(chunks) as filled:
                for chunk in filled:
                    assert_chunk(layout, chunk)
                    if error is not None:
                        raise error
                    break
            next(filled)
        lease.close()  # refuses while something holds its bytes
        before = [
            array.tobytes() for chunk in chunks[:2] for array in chunk.buffer.arrays.values() if isinstance(array, np.ndarray)
        ]
        save(namespace, [1000, *TOKENS])
        assert before == [
            array.tobytes() for chunk in chunks[:2] for array in chunk.buffer.arrays.values() if isinstance(array, np.ndarray)
        ]
        filled.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_dropped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """One that nobody iterates over, or leaves, is cancelled, and the log says so."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    chunks = cut(layout, 300, 16, 2)
    with namespace.lease(TOKENS) as lease:
        filled = lease.chunks(chunks)
        next(filled)
        del filled
    assert "dropped before it was finished" in caplog.text


def test_left_before_a_bad_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of damage in a chunk that nobody asked for any more the log tells."""
    layout = plain_layout()
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS)
        with namespace.lease(TOKENS) as lease:
            flip(data_file(store.path), lease.blocks[1].file_offset)
            with lease.chunks(cut(layout, 300, 16, 2)) as filled:
                work = filled._work
                next(filled)
                wait_until(lambda: work.over)
            del filled
    assert caplog.text.count("nobody asked: BlockDamaged") == 1


def test_refusals(store: Store) -> None:
    """What doesn't fit is refused by name, before a byte moves."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    one, two, three = (buffer(layout, 32) for _ in range(3))
    other = buffer(hybrid_layout(), 32)
    some = HostBuffer(layout, {"v": three.arrays["v"]}, 32)
    cases: list[tuple[list[Chunk], dict[str, Any], str]] = [
        ([], {}, "a chunk or more"),
        ([Chunk(0, 16, one)], {"ahead": -1}, "some or none ahead"),
        ([Chunk(0, 0, one)], {}, r"\[0, 0\)"),
        ([Chunk(8, 16, one)], {}, "a multiple of 16"),
        ([Chunk(288, 301, one)], {}, r"within \[0, 300\)"),
        ([Chunk(0, 16, one), Chunk(32, 48, two)], {}, "start at 16"),
        ([Chunk(0, 8, one), Chunk(8, 16, two)], {}, "a multiple of 16"),
        ([Chunk(0, 48, one)], {}, "a buffer of 32"),
        ([Chunk(0, 16, other)], {}, "another layout"),
        ([Chunk(0, 16, one), Chunk(16, 32, some)], {}, "different streams"),
    ]
    with namespace.lease(TOKENS) as lease:
        for chunks, options, match in cases:
            with pytest.raises(ArrayError, match=match):
                lease.chunks(chunks, **options)
        with lease.chunks([Chunk(0, 16, one), Chunk(16, 32, one)]) as filled, pytest.raises(ArrayError, match="may still hold"):
            next(filled)
        array = one.arrays["v"]
        assert isinstance(array, np.ndarray)
        array.flags.writeable = False
        with pytest.raises(ArrayError, match="'v': the array was changed"):
            lease.chunks([Chunk(0, 16, one)])
    for tokens, arrays, match in (
        (0, {}, "1 position"),
        (16, {"w": np.zeros(3)}, "'w'"),
        (16, {"v": np.zeros((15, 5), "u1")}, "'v'"),
    ):
        with pytest.raises(ArrayError, match=match):
            HostBuffer(layout, arrays, tokens)
    with pytest.raises(LeaseClosedError):
        lease.chunks([Chunk(0, 16, two)])
    assert all((array == 7).all() for each in (one, two) for array in each.arrays.values() if isinstance(array, np.ndarray))


def test_one_filling_at_a_time(store: Store) -> None:
    """A buffer is refused to others until its chunks were all taken or closed, also where all are filled already: what was checked
    for somebody isn't overwritten before he has had it.
    """
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    chunks = cut(layout, 300, 16, 2)
    with namespace.lease(TOKENS) as lease, namespace.lease(TOKENS) as other:
        for some in (chunks, chunks[:2]):
            filled = lease.chunks(some)
            for _ in range(2):
                with pytest.raises(ArrayError, match="in use for other chunks"):
                    other.chunks([Chunk(0, 16, buffer(layout, 16)), Chunk(16, 32, chunks[1].buffer)])
                assert_chunk(layout, next(filled))
            filled.close()
            with other.chunks(some) as again:
                for chunk in again:
                    assert_chunk(layout, chunk)
        assert list(lease.chunks(chunks)) == chunks  # no block to leave: the end of the loop is the end
        lost = lease.chunks(chunks[:2])
        next(lost)
        del lost
        wait_until(lambda: not chunks[0].buffer._owners)
        with pytest.raises(ArrayError, match="within"):
            lease.chunks([Chunk(288, 301, chunks[0].buffer)])
        assert not chunks[0].buffer._owners
        with lease.chunks([Chunk(0, 16, chunks[1].buffer)]), pytest.raises(ArrayError, match="in use") as refused:
            other.chunks(chunks)  # the second of them is; the first is free at once, whoever keeps the error
        assert refused.value is not None
        assert not chunks[0].buffer._owners


def test_interrupted_at_the_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the thread is being started leaves nothing behind: nothing is written any more, buffers are free again,
    and the lease can be closed.
    """
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    chunks = cut(layout, 300, 16, 2)
    arrays = {s.name: np.zeros(s.array_shape(300), s.view_dtype) for s in layout.streams}
    real = threading.Thread.start

    def before(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    def after(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    for start in (before, after):
        with namespace.lease(TOKENS) as lease:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(threading.Thread, "start", start)
                lease.chunks(chunks)
            assert not any(thread.name == "kvstore-transfer" for thread in threading.enumerate())
            assert not any(chunk.buffer._owners for chunk in chunks)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(threading.Thread, "start", start)
                lease.start_copy(arrays)
            assert not any(thread.name == "kvstore-transfer" for thread in threading.enumerate())
            with lease.chunks(chunks) as filled:
                for chunk in filled:
                    assert_chunk(layout, chunk)
        lease.close()


def test_many_at_once(store: Store) -> None:
    """Any number of threads may do so with leases of their own."""
    layout = hybrid_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for blocks in (1, 2, 5):
                with namespace.lease(TOKENS) as lease, lease.chunks(cut(layout, 300, 16 * blocks, 2)) as filled:
                    for chunk in filled:
                        assert_chunk(layout, chunk)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child(tmp_path: Path) -> None:
    """A child can't go on with its parent's chunks, and says so, and can drop them, whoever held their lock; the parent can."""
    code = """
    import gc, signal, threading
    from kvstore import Chunk, HostBuffer
    from kvstore.errors import ForkedStoreError
    layout = plain_layout()
    store = Store.open(path, max_bytes=CAP)
    namespace = store.namespace(layout)
    save(namespace, list(range(300)))
    def buffer():
        return HostBuffer(layout, {s.name: np.zeros(s.array_shape(16), s.view_dtype) for s in layout.streams}, 16)
    ring = [buffer(), buffer()]
    lease = namespace.lease(list(range(300)))
    filled = lease.chunks([Chunk(start, start + 16, ring[start // 16 % 2]) for start in range(0, 288, 16)])
    first = next(filled)
    held, done = threading.Event(), threading.Event()
    def hold():
        with filled._work.changed:
            held.set()
            done.wait()
    threading.Thread(target=hold).start()
    held.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        refused = 1
        try:
            next(filled)
        except ForkedStoreError:
            refused = 7
        del filled
        gc.collect()
        os._exit(refused)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    done.set()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(list(filled)))
    """
    assert run_child(code, tmp_path / "s") == "7 17"
