"""Numbers that one thread sets and others wait for: how far a restore has come, and whoever takes what it restored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib

__all__ = ["progress_end", "progress_set", "progress_wait"]


def progress_wait(progress: NDArray[np.int32], index: int, seconds: float) -> int:
    """Wait until an element of an array of zeros is set; returns it, 0 if time ran out first.

    The GIL is released.
    """
    milliseconds = max(0, min(int(seconds * 1000), 1 << 30))
    return int(lib.kvs_progress_wait(ffi.from_buffer("int32_t[]", progress[index : index + 1]), milliseconds))


def progress_set(progress: NDArray[np.int32], index: int, value: int) -> None:
    """Set an element, and let those go on who wait for it."""
    lib.kvs_progress_set(ffi.from_buffer("int32_t[]", progress[index : index + 1], True), value)


def progress_end(progress: NDArray[np.int32]) -> None:
    """Let go whoever waits for what won't come any more: elements that are 0 become -1."""
    for index in np.flatnonzero(progress == 0).tolist():
        progress_set(progress, index, -1)
