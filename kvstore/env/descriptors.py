"""Descriptors of a data file, beside those that LMDB has."""

from __future__ import annotations

import contextlib
import fcntl
import os

from kvstore.records.constants import DATA_FILE

__all__ = ["open_data", "open_direct", "writing"]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_data(path: str) -> int:
    """A descriptor of the data file of the store at `path`, for reading."""
    return os.open(os.path.join(path, DATA_FILE), _FLAGS)


def open_direct(path: str, identity: tuple[int, int]) -> int | None:
    """A descriptor that reads past the page cache, or None where the file system has no such reads (overlays, network).

    None as well where the name stands for another file by now than the one of this device and inode.
    """
    try:
        descriptor = os.open(os.path.join(path, DATA_FILE), _FLAGS | os.O_DIRECT)
    except OSError:
        return None
    there = os.fstat(descriptor)
    if (there.st_dev, there.st_ino) == identity:
        return descriptor
    os.close(descriptor)
    return None


def writing(path: str) -> set[int]:
    """The descriptors of this process by which the data file of the store at `path` is read and written, whoever has opened it."""
    found = set()
    with contextlib.suppress(OSError):
        there = os.stat(os.path.join(path, DATA_FILE))
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                seen, flags = os.fstat(int(name)), fcntl.fcntl(int(name), fcntl.F_GETFL)
                if (seen.st_dev, seen.st_ino) == (there.st_dev, there.st_ino) and flags & os.O_ACCMODE == os.O_RDWR:
                    found.add(int(name))
    return found
