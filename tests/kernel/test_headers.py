"""Headers read from a file many at once, and checksums of many records."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernel import crc32c, crc32c_each, read_headers
from tests.support import examples

APART = 4096
PREFIX = 96


def header(index: int, sums: int) -> bytes:
    """Make a whole header; its prefix and its sums tell it from all others."""
    head = index.to_bytes(PREFIX, "little") + np.arange(index, index + sums, dtype="<u4").tobytes()
    return head + crc32c(head).to_bytes(4, "little")


def expected_of(count: int) -> np.ndarray[Any, Any]:
    """Give what the headers begin with."""
    return np.frombuffer(b"".join(i.to_bytes(PREFIX, "little") for i in range(count)), f"V{PREFIX}")


def offsets_of(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Give where they lie."""
    return np.arange(count, dtype=np.int64) * APART + 17


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Give a descriptor of an empty file."""
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def fill(fd: int, count: int, sums: int) -> None:
    """Write headers where `offsets_of` says."""
    for index, offset in enumerate(offsets_of(count).tolist()):
        os.pwrite(fd, header(index, sums), offset)


@given(st.integers(1, 90), st.integers(0, 40), st.integers(0, 7), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_checksums_of_records(length: int, count: int, skip: int, random: Any) -> None:
    """The checksum of each record is that of its bytes behind those that are left out."""
    data = random.randbytes(length * count)
    skip = min(skip, length)
    assert crc32c_each(data, length, skip=skip).tolist() == [
        crc32c(data[length * i + skip : length * (i + 1)]) for i in range(count)
    ]


@pytest.mark.parametrize(("length", "skip"), [(0, 0), (-1, 0), (7, 0), (5, 6), (5, -1)])
def test_records_of_wrong_lengths_are_refused(length: int, skip: int) -> None:
    """Bytes that are no whole number of records, or records shorter than what is left out, are refused."""
    with pytest.raises(ValueError, match="no records"):
        crc32c_each(bytes(10), length, skip=skip)


@pytest.mark.parametrize("count", [0, 1, 32, 33, 200])
@pytest.mark.parametrize("sums", [0, 1, 16, 2000])
@pytest.mark.parametrize("cold", [False, True])
def test_whole_headers(fd: int, count: int, sums: int, cold: bool) -> None:
    """Every header comes with its sums, also those that aren't in the page cache and those longer than a page."""
    apart = APART if sums < 1000 else 4 * APART
    offsets = offsets_of(count) * (apart // APART)
    for index, offset in enumerate(offsets.tolist()):
        os.pwrite(fd, header(index, sums), offset)
    if cold:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found, status = read_headers(fd, offsets, expected_of(count), sums)
    assert found.dtype == np.uint32
    assert (found.shape, status.shape) == ((count, sums), (count,))
    assert not status.any()
    assert np.array_equal(found, np.arange(count)[:, None] + np.arange(sums))


@given(st.integers(0, PREFIX + 4 * 3 + 3), st.integers(1, 255), st.integers(0, 49))
@settings(max_examples=examples(150))
def test_any_changed_byte(place: int, mask: int, victim: int) -> None:
    """A header of which any one byte is another has EBADMSG, whichever it is, and its neighbours are whole."""
    with os.fdopen(os.memfd_create("headers"), "r+b", buffering=0) as file:
        fill(file.fileno(), 50, 3)
        at = int(offsets_of(50)[victim]) + place
        old = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([old ^ mask]), at)
        _, status = read_headers(file.fileno(), offsets_of(50), expected_of(50), 3)
    assert {i: s for i, s in enumerate(status.tolist()) if s} == {victim: errno.EBADMSG}


def test_another_header(fd: int) -> None:
    """A header that is whole but begins otherwise than expected has EBADMSG."""
    fill(fd, 40, 4)
    os.pwrite(fd, header(5, 4), int(offsets_of(40)[6]))
    _, status = read_headers(fd, offsets_of(40), expected_of(40), 4)
    assert np.flatnonzero(status).tolist() == [6]
    assert status[6] == errno.EBADMSG


@pytest.mark.parametrize("left", [0, 1, PREFIX, PREFIX + 7, PREFIX + 4 * 4 + 3])
def test_the_end_of_the_file(fd: int, left: int) -> None:
    """A header that the file ends in, or before, has EBADMSG."""
    fill(fd, 40, 4)
    os.ftruncate(fd, int(offsets_of(40)[38]) + left)
    _, status = read_headers(fd, offsets_of(40), expected_of(40), 4)
    assert status.tolist() == [0] * 38 + [errno.EBADMSG] * 2


def test_reads_that_fail(fd: int) -> None:
    """The errno of a read that fails is its status: of one that can't be at all, or of all."""
    fill(fd, 40, 4)
    offsets = offsets_of(40)
    offsets[7] = -5
    _, status = read_headers(fd, offsets, expected_of(40), 4)
    assert {i: s for i, s in enumerate(status.tolist()) if s} == {7: errno.EINVAL}
    with open(os.devnull, "wb") as unreadable:
        _, status = read_headers(unreadable.fileno(), offsets_of(40), expected_of(40), 4)
    assert set(status.tolist()) == {errno.EBADF}


@pytest.mark.parametrize(
    ("offsets", "expected", "sums", "error"),
    [
        (np.zeros(3, np.int32), np.zeros(3, "V96"), 4, TypeError),
        ([0, 1, 2], np.zeros(3, "V96"), 4, TypeError),
        (np.zeros(3, np.int64), b"abc", 4, TypeError),
        (np.zeros(3, np.int64), np.zeros(2, "V96"), 4, ValueError),
        (np.zeros((3, 1), np.int64), np.zeros((3, 1), "V96"), 4, ValueError),
        (np.zeros(6, np.int64)[::2], np.zeros(3, "V96"), 4, ValueError),
        (np.zeros(3, np.int64), np.zeros(6, "V96")[::2], 4, ValueError),
        (np.zeros(3, np.int64), np.zeros(3, "V257"), 4, ValueError),
        (np.zeros(3, np.int64), np.zeros(3, object), 4, ValueError),
        (np.zeros(3, np.int64), np.zeros(3, "V96"), -1, ValueError),
        (np.zeros(3, np.int64), np.zeros(3, "V96"), 1 << 24, ValueError),
    ],
)
def test_wrong_arguments(fd: int, offsets: Any, expected: Any, sums: int, error: type[Exception]) -> None:
    """Arrays of other types, lengths or layouts are refused before a byte is read."""
    with pytest.raises(error):
        read_headers(fd, offsets, expected, sums)


def test_many_callers(fd: int) -> None:
    """Calls from several threads at once don't disturb one another."""
    fill(fd, 150, 8)
    results: list[bool] = []

    def read() -> None:
        for _ in range(20):
            found, status = read_headers(fd, offsets_of(150), expected_of(150), 8)
            results.append(not status.any() and np.array_equal(found, np.arange(150)[:, None] + np.arange(8)))

    callers = [threading.Thread(target=read) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 120
