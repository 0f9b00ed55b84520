"""Buffers for saving that are reused: fresh memory costs a page fault for every 4 KiB, several times what copying them costs."""

from __future__ import annotations

import threading

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
        self._idle: dict[int, list[npt.NDArray[np.uint8]]] = {}  # by length, the one asked for last at the end
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """Hand out a buffer of exactly this many bytes; its contents are undefined. It is the caller's until `give`."""
        with self._lock:
            idle = self._idle.pop(length, None)
            if idle:
                self._idle[length] = idle
                self._idle_bytes -= length
                return idle.pop()
        raw = np.empty(length + self._align, np.uint8)
        address = raw.__array_interface__["data"][0]
        skip = (self._skew - address) % self._align
        return raw[skip : skip + length]

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give a buffer back. The caller keeps no reference into it. Buffers of lengths not asked for lately go first."""
        with self._lock:
            length = buffer.nbytes
            others = [other for other in self._idle if other != length]
            while self._idle_bytes + length > self._keep_bytes and others:
                other = others[0]
                if self._idle[other]:
                    self._idle[other].pop()
                    self._idle_bytes -= other
                if not self._idle[other]:
                    del self._idle[others.pop(0)]
            if self._idle_bytes + length <= self._keep_bytes:
                self._idle.setdefault(length, []).append(buffer)
                self._idle_bytes += length
