"""Host buffers that are reused: fresh memory costs a page fault for every 4 KiB, several times what copying them costs."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]


class BufferPool:
    """Buffers that are kept for reuse up to a budget. Thread-safe.

    Parameters
    ----------
    keep_bytes : int
        How many bytes of idle buffers are kept; beyond that they are freed.
    align, skew : int
        A buffer starts `skew` bytes behind a multiple of `align`: where a block's value lies in the file, so that the payload
        inside it is aligned in memory as it is there.
    """

    def __init__(self, keep_bytes: int, *, align: int, skew: int) -> None:
        self._keep_bytes = keep_bytes
        self._align, self._skew = align, skew
        self._idle: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """Hand out a buffer of exactly this many bytes; its contents are undefined. It is the caller's until `give`."""
        with self._lock:
            idle = self._idle.get(length)
            if idle:
                self._idle_bytes -= length
                return idle.pop()
        raw = np.empty(length + self._align, np.uint8)
        address = raw.__array_interface__["data"][0]
        skip = (self._skew - address) % self._align
        return raw[skip : skip + length]

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give a buffer back. The caller keeps no reference into it."""
        with self._lock:
            if self._idle_bytes + buffer.nbytes <= self._keep_bytes:
                self._idle[buffer.nbytes].append(buffer)
                self._idle_bytes += buffer.nbytes
