"""The process's own memory, sampled while something runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from types import TracebackType

__all__ = ["Watch"]

_EVERY = 0.002  # seconds


def _anonymous(status: int) -> int:
    """RssAnon of this process, in bytes: its own memory, without the pages of mapped files."""
    text = os.pread(status, 4096, 0)
    at = text.index(b"RssAnon:")
    return int(text[at + 8 : text.index(b"kB", at)]) * 1024


class Watch:
    """Samples RssAnon on a thread of its own while a `with` block runs. One object serves one block.

    Attributes
    ----------
    before, peak : int
        Bytes at the start, and the most that was seen.
    samples : int
        How often it was looked at.
    longest_gap : float
        Seconds between two samples, at most: a peak shorter than that may have been missed.
    """

    def __init__(self) -> None:
        self.before = self.peak = self.samples = 0
        self.longest_gap = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)

    def __enter__(self) -> Watch:
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc: what was freed before must not hide what is taken now
            ctypes.CDLL(None).malloc_trim(0)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self.before = self.peak = _anonymous(self._status)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._status)

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            self.peak = max(self.peak, _anonymous(self._status))
            self.samples += 1
            now = time.perf_counter()
            self.longest_gap = max(self.longest_gap, now - last)
            last = now
            time.sleep(_EVERY)

    @property
    def above_mib(self) -> float:
        """The peak above what there was at the start, in MiB."""
        return (self.peak - self.before) / 2**20
