"""The first pages of values: their headers in memory, and in the file, where they are looked at before LMDB looks at them.

Before LMDB frees a value, or puts another in its place, it reads the header of the value's first page, through its map: where
a sector is bad there, the whole store would be taken for damaged. And it believes what stands there: a wrong number of
pages would free those of others.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import struct
from typing import Any, NamedTuple

import numpy as np

from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN

__all__ = ["P_OVERFLOW", "PageHead", "ValuePages"]

_log = logging.getLogger("kvstore")

P_OVERFLOW = 0x04  # in the flags of a page's header: the first page of a value
_HEAD = struct.Struct("<QHHI")  # page number, padding, flags, pages
_FLAGS_AT = 10
_HEADER_BYTES = 64 << 10  # the most that a value's header may take before its payload begins


class PageHead(NamedTuple):
    """The header of a value's first page, as it lies in memory: MDB_page in LMDB 0.9's mdb.c.

    Attributes
    ----------
    address : int
        Where.
    page : int
        Number of the page, final as soon as the value is put.
    flags : int
        What kind of page it is.
    pages : int
        How many there are from this one on.
    """

    address: int
    page: int
    flags: int
    pages: int

    @classmethod
    def of(cls, value: Any) -> PageHead:
        """Read what LMDB has in front of a large value, given the value's bytes as LMDB hands them out."""
        address = np.frombuffer(value, np.uint8).__array_interface__["data"][0] - PAGE_HEADER
        page, _, flags, pages = _HEAD.unpack(ctypes.string_at(address, PAGE_HEADER))
        return cls(address, page, flags, pages)

    def encode(self, flags: int) -> bytes:
        """The header with other flags, as it is written to the file."""
        return _HEAD.pack(self.page, 0, flags, self.pages)

    def add_flags(self, flags: int) -> None:
        """Add flags in LMDB's memory. The value must still be where it was."""
        ctypes.c_uint16.from_address(self.address + _FLAGS_AT).value |= flags


class ValuePages:
    """The first pages of the values of a data file. For who holds the write lock.

    Parameters
    ----------
    path : str
        The file.
    fd : int
        A descriptor of it that reads. Stays the caller's.
    page_bytes : int
        Bytes of a page of LMDB.
    """

    def __init__(self, path: str, fd: int, page_bytes: int) -> None:
        self._path = path
        self._fd = fd
        self._page_bytes = page_bytes

    def sound(self, payload: int, pages: int) -> bool:
        """Whether LMDB can free a value, or put another in its place, whose bytes nobody needs any more.

        A bad sector at its beginning is written anew: disks put another in the place of one that is written to. That takes
        nothing from anybody, since it could not be read.

        Not only a precaution: what is not cached is a small read here, where a fault in LMDB's map brings 8 MiB along. Evicting 108
        blocks of 4 MiB took 0.04 to 0.15 s, not 0.7 to 1.7; 2,400 of 64 KiB, side by side, 0.7 to 1.9 s, not 0.6 to 0.9.

        Parameters
        ----------
        payload, pages : int
            File offset of its payload and pages of the value, as they are recorded.
        """
        last = (payload - 1) // self._page_bytes  # where the value's header ends, which rarely begins on an earlier page
        for number in range(last, max(last - _HEADER_BYTES // self._page_bytes - 1, 1), -1):
            try:
                raw = os.pread(self._fd, PAGE_HEADER, number * self._page_bytes)
            except OSError as error:
                return number == last and error.errno == errno.EIO and self._renew(number, pages)
            if raw[:8] == number.to_bytes(8, "little") and len(raw) == PAGE_HEADER and raw[10] & P_OVERFLOW:
                return int.from_bytes(raw[12:], "little") == pages
        return False

    def _renew(self, number: int, pages: int) -> bool:
        """Write the beginning of a value's first page past the page cache, so that a failure is told to nobody else."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        header = number.to_bytes(8, "little") + bytes(2) + P_OVERFLOW.to_bytes(2, "little") + pages.to_bytes(4, "little")
        start = number * self._page_bytes
        try:
            here, there = os.fstat(self._fd), os.fstat(fd)
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino) or start + pages * self._page_bytes > there.st_size:
                return False
            with mmap.mmap(-1, PAYLOAD_ALIGN) as sector:  # at a page's beginning, as direct writes need it
                sector[:PAGE_HEADER] = header
                os.pwrite(fd, sector, start)
            found = os.pread(self._fd, PAGE_HEADER, start) == header
        except OSError:
            return False
        finally:
            os.close(fd)
        if found:
            _log.warning("a bad sector at %d of %s was written anew, under a block that is given up", start, self._path)
        return found
