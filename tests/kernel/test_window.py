"""Windows: pieces of a file side by side, private, replaced in place."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.kernel import Window
from tests.support import run_child

PAGE = mmap.PAGESIZE
PIECE = 3 * PAGE
PIECES = 5


@pytest.fixture
def content() -> bytes:
    """Make bytes for a file of pieces and pages between them."""
    return np.random.default_rng(3).bytes(PIECES * (PIECE + PAGE))


@pytest.fixture
def fd(tmp_path: Path, content: bytes) -> Iterator[int]:
    """Return a descriptor of a file with that content."""
    path = tmp_path / "file"
    path.write_bytes(content)
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


def offsets(*pieces: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Where pieces lie."""
    return np.array([i * (PIECE + PAGE) for i in pieces], np.uint64)


def maps() -> list[str]:
    """Name the maps of this process, and how large they are."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/file" in line]


@pytest.mark.parametrize("spare", [0, PAGE, 5 << 20])
@pytest.mark.parametrize("order", [(), (0,), (4, 1, 1, 3)], ids=str)
def test_pieces_side_by_side(fd: int, content: bytes, order: tuple[int, ...], spare: int) -> None:
    """A window is its pieces in the order given, one twice, and zeros; the descriptor can go, and a detach changes no byte."""
    own = os.dup(fd)
    window = Window(own, offsets(*order), piece=PIECE, length=len(order) * PIECE + spare)
    os.close(own)
    expected = b"".join(content[i * (PIECE + PAGE) :][:PIECE] for i in order) + bytes(spare)
    address = window.address
    assert window.length == len(expected)
    for _ in range(2):
        assert ctypes.string_at(window.address, window.length) == expected
        window.populate(0, window.length)
        window.detach(threads=3)
        assert window.address == address
        assert not maps()
        os.pwrite(fd, bytes(len(content)), 0)
    window.close()
    window.close()
    assert (window.address, window.length) == (0, 0)
    window.detach()


def test_writes_are_private(fd: int, content: bytes) -> None:
    """What is written to a window reaches neither the file nor another window, and is still there after a detach."""
    first, second = (Window(fd, offsets(0, 1), piece=PIECE, length=2 * PIECE) for _ in range(2))
    ctypes.memset(first.address + PIECE - 10, 7, 20)
    assert os.pread(fd, len(content), 0) == content
    assert ctypes.string_at(second.address, PIECE) == content[:PIECE]
    first.detach()
    got = ctypes.string_at(first.address, 2 * PIECE)
    assert got[PIECE - 10 : PIECE + 10] == bytes([7] * 20)
    assert got[: PIECE - 10] == content[: PIECE - 10]
    os.pwrite(fd, b"\x05", 0)
    assert ctypes.string_at(second.address, 1) == b"\x05"  # it is the file's own page
    assert ctypes.string_at(first.address, 1) == content[:1]


def test_readers_during_a_detach(fd: int, content: bytes) -> None:
    """Threads that read a window while it is replaced see its bytes and nothing else, again and again."""
    done = threading.Event()
    wrong: list[bytes] = []
    windows = [Window(fd, offsets(2, 3), piece=PIECE, length=2 * PIECE + (4 << 20)) for _ in range(30)]
    expected = content[2 * (PIECE + PAGE) :][:PIECE]

    def read() -> None:
        while not done.is_set():
            wrong.extend(got for w in windows if (got := ctypes.string_at(w.address, PIECE)) != expected)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for window in windows:
        window.detach(threads=2)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_a_file_that_was_cut_off(fd: int, content: bytes) -> None:
    """Where the file has ended, populating and detaching are an OSError instead of a SIGBUS, and what is left can still be read."""
    window = Window(fd, offsets(0, 4), piece=PIECE, length=2 * PIECE)
    os.ftruncate(fd, PIECE)
    with pytest.raises(OSError, match="cannot replace") as caught:
        window.detach()
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="cannot read") as caught:
        window.populate(PIECE, 1)
    assert caught.value.errno == errno.EFAULT
    assert ctypes.string_at(window.address, PIECE) == content[:PIECE]
    assert len(maps()) == 2


def test_what_does_not_fit_is_refused(fd: int) -> None:
    """Sizes and offsets that are no multiples of the page size or don't fit together are refused, and ranges outside too."""
    for given, piece, length in (
        (offsets(0) + np.uint64(512), PIECE, PIECE),
        (offsets(0), PIECE - 1, PIECE),
        (offsets(0), PIECE, PIECE + 1),
        (offsets(0, 1), PIECE, PIECE),
        (offsets(0), -PIECE, PIECE),
        (offsets(0), 0, PIECE),
        (offsets(), 0, 1 << 47),
        (offsets(), 0, -PAGE),
        (np.array([1 << 63], np.uint64), PIECE, PIECE),
        (offsets(0).reshape(1, 1), PIECE, PIECE),
    ):
        with pytest.raises(ValueError, match=r"multiples|length must|1-D"):
            Window(fd, given, piece=piece, length=length)
    window = Window(fd, offsets(0), piece=PIECE, length=PIECE)
    for offset, length in ((-1, 1), (0, -1), (0, PIECE + 1), (PIECE, 1)):
        with pytest.raises(ValueError, match="isn't within"):
            window.populate(offset, length)
    for threads in (0, -1, 65):
        with pytest.raises(ValueError, match="threads"):
            window.detach(threads=threads)
    with pytest.raises(OSError, match="cannot map 1 pieces") as caught:
        Window(-1, offsets(0), piece=PIECE, length=PIECE)
    assert caught.value.errno == errno.EBADF
    empty = Window(fd, offsets(), piece=0, length=0)
    assert (empty.address, empty.length) == (0, 0)


def test_too_many_maps() -> None:
    """When the process can have no more maps, a window is an OSError, nothing of it is left, and once there is room it works."""
    if int(Path("/proc/sys/vm/max_map_count").read_text()) > 300_000:
        pytest.skip("this system hardly limits the number of maps")
    code = """
    import ctypes, mmap
    from kvstore.kernel import Window
    count = lambda: sum(1 for _ in open("/proc/self/maps"))
    fd = os.open(sys.executable, os.O_RDONLY)
    taken = []
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    failed = ctypes.c_void_p(-1).value
    while True:
        page = libc.mmap(None, mmap.PAGESIZE, 1, 2, fd, 0)  # the same page of a file over and over: none can be joined
        if page == failed:
            break
        taken.append(page)
    for page in taken[-1000:-800]:  # room for a part of the window
        libc.munmap(page, mmap.PAGESIZE)
    offsets = np.zeros(400, np.uint64)
    before = count()
    for _ in range(3):
        try:
            Window(fd, offsets, piece=mmap.PAGESIZE, length=400 * mmap.PAGESIZE)
            print("made")
        except OSError as error:
            assert error.errno == 12, error
    assert count() == before, (count(), before)
    for page in taken[-800:]:
        libc.munmap(page, mmap.PAGESIZE)
    window = Window(fd, offsets, piece=mmap.PAGESIZE, length=400 * mmap.PAGESIZE)
    window.detach()
    print("ok")
    """
    assert run_child(code, "-") == "ok"
