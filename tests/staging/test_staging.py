"""Staging buffers: aligned, reused, within a budget, given back."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

from kvstore import Staging
from kvstore.errors import StagingBusyError, StagingClosedError
from tests.support import run_child

PAGE = os.sysconf("SC_PAGESIZE")


def test_buffers_are_whole_pages() -> None:
    """A buffer starts on a page, has a whole number of pages, and can be written from end to end."""
    for wanted, size in ((1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (100_000, -(-100_000 // PAGE) * PAGE)):
        with Staging(4 * size, chunk_bytes=wanted) as staging:
            assert (staging.chunk_bytes, staging.buffers) == (size, 4)
            buffer = staging.take()
            assert buffer.address % PAGE == 0
            assert buffer.array.shape == (size,)
            assert buffer.array.__array_interface__["data"] == (buffer.address, False)
            buffer.array[:] = 7
            staging.give(buffer)


def test_the_budget_holds_and_buffers_are_reused() -> None:
    """Never more buffers than the budget has room for; one that was given back is handed out again."""
    with Staging(3 * PAGE + 1, chunk_bytes=PAGE) as staging:
        buffers = [staging.take() for _ in range(3)]
        assert len({b.address for b in buffers}) == staging.in_use == 3
        with pytest.raises(StagingBusyError, match=r"1 of 3 .*0\.01 s"):
            staging.take(0.01)
        staging.give(buffers[1])
        assert staging.take(0) is buffers[1]
        for buffer in buffers:
            staging.give(buffer)
        assert {staging.take().address for _ in range(3)} == {b.address for b in buffers}


def test_all_or_none() -> None:
    """Several buffers come together or not at all."""
    with Staging(3 * PAGE, chunk_bytes=PAGE) as staging:
        first = staging.take_many(2)
        with pytest.raises(StagingBusyError):
            staging.take_many(2, 0.01)
        assert staging.in_use == 2
        for buffer in first:
            staging.give(buffer)
        assert len(staging.take_many(3, 0)) == 3


def test_who_waits_is_woken() -> None:
    """A thread that waits for a buffer gets the one that another gives back; a hundred turns of six threads and two buffers."""
    with Staging(2 * PAGE, chunk_bytes=PAGE) as staging:
        wrong: list[int] = []

        def work(number: int) -> None:
            for _ in range(100):
                buffer = staging.take(60)
                buffer.array[:] = number
                if not (buffer.array == number).all():
                    wrong.append(number)
                staging.give(buffer)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert staging.in_use == 0


def test_misuse() -> None:
    """Budgets and counts that can't be, a buffer of somebody else's and one given back twice are refused."""
    for budget, chunk in ((PAGE - 1, PAGE), (1 << 20, 0), (0, PAGE), (PAGE, PAGE + 1)):
        with pytest.raises(ValueError, match=r"chunk_bytes|budget"):
            Staging(budget, chunk_bytes=chunk)
    with Staging(2 * PAGE, chunk_bytes=PAGE) as staging, Staging(PAGE, chunk_bytes=PAGE) as other:
        for count in (0, 3):
            with pytest.raises(ValueError, match="1 to 2"):
                staging.take_many(count)
        buffer = other.take()
        with pytest.raises(ValueError, match="not taken here"):
            staging.give(buffer)
        other.give(buffer)
        with pytest.raises(ValueError, match="given back already"):
            other.give(buffer)


def test_after_close() -> None:
    """After close nothing is handed out, who waits is told, and a buffer that was out can still be used and given back."""
    staging = Staging(PAGE, chunk_bytes=PAGE)
    buffer = staging.take()
    told: list[str] = []

    def wait() -> None:
        try:
            staging.take(60)
        except StagingClosedError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    staging.close()
    thread.join()
    assert len(told) == 1
    with pytest.raises(StagingClosedError, match="closed"):
        staging.take()
    buffer.array[:] = 1
    staging.give(buffer)
    assert buffer.array.size == 0
    staging.close()


def test_memory_goes_back() -> None:
    """Closing unmaps the buffers; a view that somebody kept stays readable until it goes."""
    maps = "/proc/self/maps"
    if not os.path.exists(maps):
        pytest.skip("needs /proc")

    def mapped(address: int) -> bool:
        with open(maps) as lines:
            return any(int(a, 16) <= address < int(b, 16) for a, b in (line.split()[0].split("-") for line in lines))

    staging = Staging(2 << 20, chunk_bytes=1 << 20)
    first, second = staging.take_many(2)
    addresses = first.address, second.address
    second.array[:3] = (1, 2, 3)
    kept = second.array[:3]
    staging.give(first)
    staging.give(second)
    staging.close()
    gc.collect()
    assert not mapped(addresses[0])
    assert mapped(addresses[1])
    assert kept.tolist() == [1, 2, 3]
    del kept
    gc.collect()
    assert not mapped(addresses[1])


def test_a_forked_child_gets_none() -> None:
    """In a forked child nothing is handed out, and its end leaves the parent's buffers alone."""
    code = """
    staging = Staging(1 << 16, chunk_bytes=4096)
    buffer = staging.take()
    buffer.array[:] = 9
    pid = os.fork()
    if not pid:
        try:
            staging.take()
        except errors.StagingClosedError as error:
            staging.close()
            os._exit(17 if "forked" in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), bool((buffer.array == 9).all()), staging.take().array.size)
    """
    assert run_child(code, "-") == "17 True 4096"


def test_as_numpy_sees_it() -> None:
    """Slices of a buffer can be looked at as any dtype."""
    with Staging(PAGE, chunk_bytes=PAGE) as staging:
        buffer = staging.take()
        buffer.array[:64].view(np.float32).reshape(4, 4)[...] = 1.5
        assert buffer.array[:4].tobytes() == np.float32(1.5).tobytes()
