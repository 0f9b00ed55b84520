"""A buffer that chunks of a restore go through on their way into llama.cpp: a blob whose rows are filled again and again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.frame import Frame
from kvstore.ids import TokenArray
from kvstore.layout import Layout
from kvstore.leases import HostBuffer

__all__ = ["Slot"]


class Slot:
    """A buffer that chunks of so many positions go through: a blob, of which all but rows and positions stays the same.

    It may lie over another one, which then has to be written anew.
    """

    def __init__(self, frame: Frame, blob: npt.NDArray[np.uint8], layout: Layout, over: Slot | None = None) -> None:
        self.frame = frame
        self.blob = blob
        self.buffer = HostBuffer(layout, frame.streams(blob), frame.cells.rows or 0)
        self._over = over
        self._written = False

    def place(self, seq_id: int, stop: int, tokens: TokenArray) -> None:
        """Write what lies around the rows, which end before position `stop`."""
        if self._written:
            self.frame.place(self.blob, stop, tokens)
            return
        self.frame.write(self.blob, seq_id, stop, tokens)
        self._written = True
        if self._over is not None:
            self._over._written = False
