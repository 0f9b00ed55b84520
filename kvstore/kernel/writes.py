"""Writes to a file on a thread of the kernel's, each begun on its way to the disk at once."""

from __future__ import annotations

from typing import Any

from kvstore.kernel._native import ffi, lib

__all__ = ["Writes"]

_MAX_HEAD: int = lib.KVS_MAX_HEAD


class Writes:
    """A queue of writes to a file, done in order by a thread that needs no interpreter. For one thread at a time.

    `end` it before the memory that was given to it goes. Not for forked children, which don't have the thread.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    @classmethod
    def start(cls, fd: int) -> Writes | None:
        """Start a thread that writes to a descriptor, which stays the caller's. None where no thread is to be had.

        Once the file is shorter than it is now, nothing more is written to it: an EIO.
        """
        queue = lib.kvs_writes_start(fd)
        return None if queue == ffi.NULL else cls(queue)

    def add(self, head: bytes, address: int, length: int, offset: int) -> None:
        """Queue `length` bytes at an address, to be written at a file offset, beginning with `head` in the place of their own.

        The memory must live and not change until `wait` or `end` has returned.

        Raises
        ------
        ValueError
            The lengths don't fit one another, or it has ended.
        MemoryError
            It is not queued.
        """
        if self._queue is None or not len(head) <= min(length, _MAX_HEAD) or offset < 0:
            raise ValueError(f"cannot queue {length} bytes at {offset} beginning with {len(head)} others (at most {_MAX_HEAD})")
        if lib.kvs_writes_add(self._queue, head, len(head), address, length, offset):
            raise MemoryError("no memory for the next write")

    def wait(self) -> int:
        """Wait until all is written that was queued, without the GIL. Returns 0, or the errno of the first write that failed.

        What was queued behind that one is not written. What is written is in the page cache, and not on the disk yet.
        """
        return 0 if self._queue is None else int(lib.kvs_writes_wait(self._queue))

    def end(self) -> None:
        """Wait as well, and end the thread. Idempotent."""
        queue, self._queue = self._queue, None
        if queue is not None:
            lib.kvs_writes_end(queue)
