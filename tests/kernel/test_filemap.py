"""Maps of files that may grow, and reading them without signals."""

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from kvstore.kernel import FileMap

PAGE = mmap.PAGESIZE


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """Return a descriptor of a file of three pages and ten bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"\x01" * (3 * PAGE + 10))
    return os.open(path, os.O_RDWR)


def test_longer_than_the_file(fd: int) -> None:
    """A map may exceed its file, and shows what the file grows by, after the descriptor is closed too."""
    view = FileMap(fd, 100 * PAGE)
    view.populate(0, 3 * PAGE + 10)
    assert ctypes.string_at(view.address + 3 * PAGE, 12) == b"\x01" * 10 + b"\0\0"
    os.pwrite(fd, b"\x02" * PAGE, 10 * PAGE)
    os.close(fd)
    view.populate(5, 11 * PAGE - 5)
    assert ctypes.string_at(view.address + 10 * PAGE, 2) == b"\x02\x02"
    view.close()


def test_populate_beyond_the_file(fd: int) -> None:
    """Populating what the file doesn't have is an OSError instead of a SIGBUS."""
    view = FileMap(fd, 100 * PAGE)
    with pytest.raises(OSError, match="cannot read") as raised:
        view.populate(0, 5 * PAGE)
    assert raised.value.errno == errno.EFAULT
    view.populate(0, 0)
    os.close(fd)
    view.close()


def test_bounds(fd: int) -> None:
    """A range outside the map and a length that can't be are refused."""
    view = FileMap(fd, 2 * PAGE)
    for offset, length in ((-1, 1), (0, -1), (0, 2 * PAGE + 1), (2 * PAGE, 1)):
        with pytest.raises(ValueError, match="isn't within"):
            view.populate(offset, length)
    view.close()
    for length in (0, -1, 1 << 60):
        with pytest.raises(ValueError, match="length of a map"):
            FileMap(fd, length)
    os.close(fd)
    with pytest.raises(OSError, match="cannot map"):
        FileMap(fd, PAGE)


def test_close(fd: int) -> None:
    """A closed map says so, and closing twice is harmless."""
    view = FileMap(fd, PAGE)
    os.close(fd)
    assert (view.length, view.address > 0) == (PAGE, True)
    view.close()
    view.close()
    assert (view.length, view.address) == (0, 0)
    with pytest.raises(ValueError, match="closed"):
        view.populate(0, 1)
