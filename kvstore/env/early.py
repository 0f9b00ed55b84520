"""Values on their way to the disk while their transaction goes on.

LMDB writes a value when its transaction is committed: until then the disk has nothing to do, and while it works nothing is
copied. Here each large value is written as soon as it is put, by a thread of the kernel's, and the disk begins with it at once.
LMDB does the same where a transaction outgrows its list of pages (it calls that spilling), and for the same reason nobody can
see it: the pages are free ones until the commit, which waits for the disk as ever.

LMDB is kept from writing them once more by a flag in the page's header, which it has for pages that it must not write yet, and
which it forgets with the transaction (`P_KEEP` in LMDB 0.9's mdb.c).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lmdb
import numpy as np

from kvstore.env.values import P_OVERFLOW, PageHead
from kvstore.kernel import Writes, keep_freed
from kvstore.records.constants import PAGE_HEADER

__all__ = ["EarlyValues"]

_P_DIRTY = 0x10  # in memory, and changed by the transaction; never so in a file
_P_KEEP = 0x8000  # not to be written by the commit
_LEAST = 128 << 10  # bytes of a value: smaller ones cost more to hand over than to write
_ENGINE = (0, 9)  # whose flags these are


class EarlyValues:
    """The values of one write transaction that are written ahead of its commit. For the transaction's thread.

    Parameters
    ----------
    fd : int
        The descriptor by which LMDB writes. Stays LMDB's.
    page_bytes : int
        Bytes of a page of LMDB.
    """

    __slots__ = ("_begun", "_fd", "_held", "_page_bytes", "_writes")

    def __init__(self, fd: int, page_bytes: int) -> None:
        self._fd = fd
        self._page_bytes = page_bytes
        self._writes: Writes | None = None
        self._begun: dict[bytes, PageHead] = {}
        self._held: list[memoryview] = []  # what is read by the thread

    @staticmethod
    def possible(fd: int) -> bool:
        """Whether this engine and this descriptor allow it; else LMDB writes its values itself."""
        return fd >= 0 and tuple(lmdb.version()[:2]) == _ENGINE

    def begin(self, key: bytes, head: PageHead, value: memoryview) -> None:
        """Begin to write a value that was just put, from the caller's memory: LMDB may free its own copy at any time.

        Small values, and those that don't fill their pages, are left to LMDB.

        Parameters
        ----------
        head : PageHead
            Of the value in LMDB's memory.
        value : memoryview
            Its bytes; they must not change before the transaction has ended.
        """
        self._begun.pop(key, None)  # one of the same key that was deleted: LMDB may have put this one in its place, of memory too
        length = PAGE_HEADER + value.nbytes
        if head.flags != P_OVERFLOW | _P_DIRTY or length < _LEAST or length != head.pages * self._page_bytes:
            return
        keep_freed()  # LMDB's copies of values are of one size, and as many again come with the next transaction
        if self._writes is None:
            self._writes = Writes.start(self._fd)
        if self._writes is not None:
            address = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
            self._held.append(value)
            self._writes.add(head.encode(P_OVERFLOW), address - PAGE_HEADER, length, head.page * self._page_bytes)
            self._begun[key] = head

    def finish(self, look: Callable[[bytes], Any]) -> None:
        """Wait for all of them and keep LMDB from writing them again. Right before the commit.

        Parameters
        ----------
        look : callable
            Gives a value's bytes in LMDB's memory, or None if it was deleted since.

        Raises
        ------
        OSError
            When one could not be written. The transaction must be aborted.
        """
        if self._writes is None:
            return
        error = self._writes.wait()
        self.end()
        if error:
            raise OSError(error, os.strerror(error))
        for key, head in self._begun.items():
            value = look(key)
            if value is not None and PageHead.of(value) == head:  # not where it was deleted, or written by LMDB meanwhile
                head.add_flags(_P_KEEP)
        self._begun.clear()

    def end(self) -> None:
        """Wait, and write no more. Before the transaction is aborted, and before anybody else may write. Idempotent."""
        if self._writes is not None:
            self._writes.end()
            self._writes = None
        self._held.clear()
