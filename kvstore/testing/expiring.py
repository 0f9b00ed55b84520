"""Arrays that an engine hands out until its next call, and destroys then: who keeps one without copying it is found out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.testing.sessions import Array

__all__ = ["STALE", "Expiring", "fill"]

STALE = 0x5A


class Expiring:
    """The arrays of an engine's last `capture`. `expire` is called at the beginning of each of its other calls."""

    def __init__(self) -> None:
        self._handed_out: list[Array] = []

    def hand_out(self, *arrays: Array) -> None:
        """Remember arrays of the engine's own that somebody else may look at until the next call."""
        self._handed_out.extend(arrays)

    def expire(self) -> None:
        """Overwrite them with noise."""
        for array in self._handed_out:
            fill(array, STALE)
        self._handed_out = []


def fill(array: Array, byte: int) -> None:
    """Set every byte of an array, at whatever strides."""
    raw: npt.NDArray[np.uint8] = np.full(array.nbytes, byte, np.uint8)
    array[...] = raw.view(array.dtype).reshape(array.shape)
