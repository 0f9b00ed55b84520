"""Writes on a thread of the kernel's: in order, whole, and nothing behind one that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.kernel import Writes
from tests.support import examples


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Give a descriptor of an empty file."""
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def started(fd: int) -> Writes:
    """Start a queue."""
    queue = Writes.start(fd)
    assert queue is not None
    return queue


def address(data: np.ndarray[Any, Any]) -> int:
    """Where an array lies."""
    return int(data.__array_interface__["data"][0])


@given(
    runs=st.lists(st.tuples(st.sampled_from([1, 16, 4095, 1 << 20, (1 << 20) + 1, (3 << 20) - 7]), st.integers(0, 32)), max_size=6),
    apart=st.integers(0, 3),
)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_queued_is_written(fd: int, runs: list[tuple[int, int]], apart: int) -> None:
    """Each run lies where it was to lie, with its other beginning, however long it is; what was there besides stays."""
    os.ftruncate(fd, 0)
    random = np.random.default_rng(len(runs) + apart)
    expected, queued, at = bytearray(), [], 0
    queue = started(fd)
    for length, wanted in runs:
        head = random.bytes(min(wanted, length))
        data = random.integers(0, 256, length, np.uint8)
        queued.append(data)
        queue.add(head, address(data), length, at)
        expected += head + data.tobytes()[len(head) :] + bytes(apart)
        at += length + apart
    assert queue.wait() == 0
    queue.end()
    found = os.pread(fd, at + 1, 0)
    assert found == bytes(expected)[: len(found)]
    assert len(found) == max(at - apart, 0)


def test_in_order(fd: int) -> None:
    """Of two writes to one place the later one is what stays; the end waits for what nobody has waited for."""
    first, second = np.full(3 << 20, 1, np.uint8), np.full(2 << 20, 2, np.uint8)
    queue = started(fd)
    for _ in range(5):
        queue.add(b"", address(first), first.size, 0)
        queue.add(b"x", address(second), second.size, 0)
    queue.end()
    queue.end()
    assert os.pread(fd, first.size + 1, 0) == b"x" + bytes([2]) * (second.size - 1) + bytes([1]) * (1 << 20)
    assert queue.wait() == 0


def test_nothing_behind_a_failure(fd: int, tmp_path: Path) -> None:
    """The first write that fails is reported each time, and nothing is written behind it."""
    data = np.full(100, 7, np.uint8)
    queue = started(fd)
    queue.add(b"", address(data), 10, 0)
    queue.add(b"", 4096, 100, 10)  # where nothing is mapped
    queue.add(b"", address(data), data.size, 10)
    assert queue.wait() == errno.EFAULT
    queue.add(b"", address(data), data.size, 10)
    assert queue.wait() == errno.EFAULT
    queue.end()
    assert os.pread(fd, 200, 0) == bytes([7]) * 10
    (tmp_path / "other").write_bytes(b"old")
    reading = os.open(tmp_path / "other", os.O_RDONLY)
    try:
        queue = started(reading)
        queue.add(b"", address(data), data.size, 0)
        assert queue.wait() == errno.EBADF
        queue.end()
    finally:
        os.close(reading)
    assert (tmp_path / "other").read_bytes() == b"old"


def test_a_file_that_was_cut_off(fd: int) -> None:
    """Nothing is written once the file is shorter than it was in the beginning: what lies between would read as zeros."""
    data = np.full(3 << 20, 7, np.uint8)
    os.ftruncate(fd, 1 << 20)
    queue = started(fd)
    queue.add(b"", address(data), 100, 1 << 20)
    assert queue.wait() == 0
    os.ftruncate(fd, 5000)
    queue.add(b"", address(data), data.size, 1 << 20)
    assert queue.wait() == errno.EIO
    queue.end()
    assert os.fstat(fd).st_size == 5000


def test_refusals(fd: int) -> None:
    """A beginning that is longer than the run or than there is room for, a place before the file, a queue that has ended."""
    data = np.zeros(64, np.uint8)
    queue = started(fd)
    for head, length, offset in ((b"ab", 1, 0), (bytes(33), 64, 0), (b"", 64, -1)):
        with pytest.raises(ValueError, match="cannot queue"):
            queue.add(head, address(data), length, offset)
    queue.end()
    with pytest.raises(ValueError, match="cannot queue"):
        queue.add(b"", address(data), 64, 0)
    assert os.fstat(fd).st_size == 0
