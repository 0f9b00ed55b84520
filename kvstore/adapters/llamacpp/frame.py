"""A blob of a known geometry and number of cells: where everything lies in it.

With the geometry known, all bytes of a blob but positions and rows are known, too. So reading a blob is comparing its
headers with the ones that are expected, and writing one is putting those headers where they belong.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError
from kvstore.adapters.llamacpp.geometry import CELL, MAGIC, Geometry, Part
from kvstore.tier.protocol import Array

__all__ = ["Frame"]

Buffer = npt.NDArray[np.uint8]


class Frame:
    """Where the headers, the cells and the rows of a blob lie.

    Parameters
    ----------
    geometry : Geometry
        What the context's blobs look like.
    cells : int
        At least one.

    Attributes
    ----------
    nbytes : int
        Length of the blob.
    """

    def __init__(self, geometry: Geometry, cells: int) -> None:
        if cells < 1:
            raise BlobError(f"a blob has at least one cell, got {cells}")
        self.geometry, self.cells = geometry, cells
        self._streams = geometry.streams()
        self._cells_at = struct.calcsize("<IiII")
        offset = self._cells_at + cells * CELL.itemsize
        body = struct.pack("<II", geometry.transposed, len(geometry.keys))
        if geometry.version >= 4:
            body += struct.pack("<II", *geometry.rotation)
        self._headers = [(offset, body)]  # of the layers, then of each part
        self._rows: dict[str, int] = {}
        offset += len(body)
        for kind, parts in (("k", geometry.keys), ("v", geometry.values)):
            for layer, part in enumerate(parts):
                header = _part_header(part, transposed=kind == "v" and geometry.transposed)
                self._headers.append((offset, header))
                offset += len(header)
                self._rows[f"{kind}.{layer}"] = offset
                offset += part.row_bytes * cells
        self.nbytes = offset

    def _head(self, seq_id: int) -> bytes:
        return struct.pack("<IiII", MAGIC, seq_id, 1, self.cells)

    def _table(self, blob: Buffer) -> npt.NDArray[np.void]:
        return blob[self._cells_at : self._cells_at + self.cells * CELL.itemsize].view(CELL)

    def write(self, blob: Buffer, seq_id: int) -> None:
        """Write everything but the rows, for the positions [0, cells) of a sequence."""
        self._check_size(blob)
        for offset, header in ((0, self._head(seq_id)), *self._headers):
            blob[offset : offset + len(header)] = np.frombuffer(header, np.uint8)
        table = self._table(blob)
        table["position"] = np.arange(self.cells, dtype="<i4")
        table["sequences"] = 1
        table["sequence"] = seq_id

    def check(self, blob: Buffer, seq_id: int, start: int) -> npt.NDArray[np.intp] | None:
        """Check everything but the rows, for the positions [start, start + cells) of a sequence.

        Returns
        -------
        None or ndarray
            None when the cells come in the order of their positions. Else the order in which to take them: a cache whose
            cells were used by other sequences before fills the holes first.

        Raises
        ------
        BlobError
            When one byte is not as expected, or the positions are others, incomplete or not unique.
        """
        self._check_size(blob)
        for offset, header in ((0, self._head(seq_id)), *self._headers):
            if blob[offset : offset + len(header)].tobytes() != header:
                raise BlobError(f"the blob's header at offset {offset} is not the one expected of this context")
        table = self._table(blob)
        if (table["sequences"] != 1).any() or (table["sequence"] != seq_id).any():
            raise BlobError("the blob's cells belong to other sequences")
        wanted = np.arange(start, start + self.cells, dtype="<i4")
        positions = table["position"]
        if np.array_equal(positions, wanted):
            return None
        order = np.argsort(positions, kind="stable")
        if not np.array_equal(positions[order], wanted):
            raise BlobError(
                f"the blob holds positions {positions.min()} to {positions.max()}, not each of [{start}, {start + self.cells})"
            )
        return order

    def arrays(self, blob: Buffer) -> dict[str, Array]:
        """View the rows as the streams of the layout, in layout order; writes go to the blob."""
        self._check_size(blob)
        return {
            stream.name: np.ndarray(
                stream.array_shape(self.cells), stream.view_dtype, buffer=blob.data, offset=self._rows[stream.name]
            )
            for stream in self._streams
        }

    def _check_size(self, blob: Buffer) -> None:
        if blob.size != self.nbytes:
            raise BlobError(f"a blob of {self.cells} cells of this context has {self.nbytes} bytes, got {blob.size}")


def _part_header(part: Part, *, transposed: bool) -> bytes:
    if transposed:
        return struct.pack("<iII", part.ggml_type, part.element_bytes, part.elements)
    return struct.pack("<iQ", part.ggml_type, part.row_bytes)
