"""llama.cpp's blob of a sequence, put together from rows and taken apart: for attention-only models with flash attention.

So a context holds the sessions of the comparison without computing them. What frames the rows is learned from a blob of one token,
since it differs between builds. Used by children of both environments: numpy alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from benches.peers.shape import Bytes, Shape

__all__ = ["Blob"]

_ONE, _F16 = 1, 1
_CELL = struct.Struct("<iIi")  # position, number of sequences, sequence
_ROWS = struct.Struct("<iQ")  # type, bytes of a row


class Blob:
    """How a build frames its rows.

    Parameters
    ----------
    shape : Shape
        K and V of each layer, in the order in which they lie in the blob.
    sample : array of uint8
        The blob of a sequence with one token.
    """

    def __init__(self, shape: Shape, sample: Bytes) -> None:
        self.shape = shape
        raw = sample.tobytes()
        rows = _ROWS.pack(_F16, shape.row_bytes)
        first = raw.find(rows, 16)
        # magic, sequence, streams, cells, the cell, then flags up to the first rows
        if first < 16 + _CELL.size or struct.unpack_from("<I", raw, 12)[0] != _ONE:
            raise ValueError("this build's blob is not of the kind that is known here")
        self._start, self._flags = raw[:12], raw[16 + _CELL.size : first]
        self._rows = rows
        if self.size(1) != len(raw):
            raise ValueError(f"a blob of one token has {len(raw)} bytes, expected {self.size(1)}")

    def size(self, tokens: int) -> int:
        """Bytes of a blob."""
        head = len(self._start) + 4 + tokens * _CELL.size + len(self._flags)
        return head + self.shape.streams * (_ROWS.size + tokens * self.shape.row_bytes)

    def _segments(self, tokens: int) -> list[int]:
        """Where each stream's rows begin."""
        at = len(self._start) + 4 + tokens * _CELL.size + len(self._flags)
        step = _ROWS.size + tokens * self.shape.row_bytes
        return [at + i * step + _ROWS.size for i in range(self.shape.streams)]

    def build(self, arrays: Sequence[Bytes], tokens: int, seq: int = 0) -> Bytes:
        """Make the blob of the first `tokens` rows."""
        cells = np.zeros(tokens, [("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
        cells["position"], cells["sequences"], cells["sequence"] = np.arange(tokens), 1, seq
        parts = [self._start, struct.pack("<I", tokens), cells.tobytes(), self._flags]
        for array in arrays:
            parts += [self._rows, np.ascontiguousarray(array[:tokens]).tobytes()]
        return np.frombuffer(bytearray().join(parts), np.uint8)

    def take(self, blob: Bytes, arrays: Sequence[Bytes], tokens: int) -> None:
        """Copy the rows out of a blob of `tokens` tokens."""
        if blob.size != self.size(tokens):
            raise ValueError(f"a blob of {tokens} tokens has {blob.size} bytes, expected {self.size(tokens)}")
        for array, at in zip(arrays, self._segments(tokens), strict=True):
            array[:tokens] = blob[at : at + tokens * self.shape.row_bytes].reshape(tokens, self.shape.row_bytes)
