"""Buffers that the chunks of a restore go through on their way into llama.cpp: blobs whose rows are filled again and again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.frame import Cells, Frame
from kvstore.adapters.llamacpp.geometry import Geometry
from kvstore.ids import TokenArray
from kvstore.layout import Layout
from kvstore.leases import HostBuffer

__all__ = ["Slot", "Slots"]

_PLACES = 3  # one is read; cold ones are filled two at once
_LAST = 32  # descriptions of last chunks that are kept, of some 100 KB each


class Slot:
    """A buffer for a chunk of so many positions: a blob, of which all but rows and positions stays the same.

    Parameters
    ----------
    frame : Frame
        What lies where in the blob.
    blob : uint8[frame.nbytes]
        The memory. It is kept.
    layout : Layout
        Of the session.
    alone : bool
        Whether nothing else is written to the blob's memory.
    """

    def __init__(self, frame: Frame, blob: npt.NDArray[np.uint8], layout: Layout, *, alone: bool) -> None:
        self.frame = frame
        self.blob = blob
        self.buffer = HostBuffer(layout, frame.streams(blob), frame.cells.rows or 0)
        self._alone = alone
        self._written = False

    def place(self, seq_id: int, stop: int, tokens: TokenArray) -> None:
        """Write what lies around the rows, which end before position `stop`."""
        if self._written:
            self.frame.place(self.blob, stop, tokens)
        else:
            self.frame.write(self.blob, seq_id, stop, tokens)
            self._written = self._alone


class Slots:
    """The buffers of one engine: three for chunks of `step` positions, by turns, and one for a last chunk of fewer.

    Where rows lie in a blob depends on how many there are. To describe them anew, 60 arrays or more, takes as long as restoring
    some MB: so what last chunks of other lengths were is remembered, all of them over one memory.

    Parameters
    ----------
    geometry : Geometry
        What blobs look like.
    layout : Layout
        Of the session.
    step : int
        Positions of a chunk.
    """

    def __init__(self, geometry: Geometry, layout: Layout, step: int) -> None:
        self._geometry, self._layout, self._step = geometry, layout, step
        self._whole: dict[int, Slot] = {}
        self._last: OrderedDict[int, Slot] = OrderedDict()
        self._last_blob: npt.NDArray[np.uint8] | None = None

    def get(self, number: int, rows: int) -> Slot:
        """Give the buffer of a restore's chunk of that number, which has so many positions; only the last has fewer than `step`."""
        if rows < self._step:
            return self._for_last(rows)
        slot = self._whole.get(number % _PLACES)
        if slot is None:
            frame = Frame(self._geometry, Cells.of_rows(self._geometry, rows))
            slot = Slot(frame, np.empty(frame.nbytes, np.uint8), self._layout, alone=True)
            self._whole[number % _PLACES] = slot
        return slot

    @property
    def ahead(self) -> int:
        """How many chunks may be under way beyond the one that is read."""
        return _PLACES - 1

    def _for_last(self, rows: int) -> Slot:
        slot = self._last.pop(rows, None)
        if slot is None:
            if self._last_blob is None:
                self._last_blob = np.empty(Frame(self._geometry, Cells.of_rows(self._geometry, self._step)).nbytes, np.uint8)
            frame = Frame(self._geometry, Cells.of_rows(self._geometry, rows))
            slot = Slot(frame, self._last_blob[: frame.nbytes], self._layout, alone=False)
            if len(self._last) == _LAST:
                self._last.popitem(last=False)
        self._last[rows] = slot
        return slot
