"""A blob of a known geometry and known numbers of cells: where everything lies in it.

With the geometry known, all bytes of a blob but positions, tokens and rows are known, too. So reading a blob is comparing
its headers with the ones that are expected, and writing one is putting those headers where they belong.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError
from kvstore.adapters.llamacpp.geometry import MAGIC, POSITION, Attention, Geometry, Part
from kvstore.ids import TokenArray
from kvstore.layout import State, Stream
from kvstore.tier.protocol import Array

__all__ = ["Cells", "Frame", "fit"]

Buffer = npt.NDArray[np.uint8]


class Cells(NamedTuple):
    """How many cells each section of a blob has; None where the blob has no such section.

    Attributes
    ----------
    rows, window, recurrent : int or None
        Cells of the attention rows, of the window, and of the recurrent part (1, or 0).
    """

    rows: int | None
    window: int | None
    recurrent: int | None

    @classmethod
    def of_rows(cls, geometry: Geometry, rows: int) -> Cells:
        """Those of a sequence that holds rows alone: the other sections, where a model has them, are empty."""
        return cls(
            None if geometry.rows is None else rows,
            None if geometry.window is None else 0,
            None if geometry.recurrent is None else 0,
        )


class _Section(NamedTuple):
    """A section of cells with K and V, as it lies in a blob."""

    table: int
    cells: int
    parts: list[tuple[Stream, int]]


class Frame:
    """Where the headers, the cells and the rows of a blob lie.

    Parameters
    ----------
    geometry : Geometry
        What the context's blobs look like.
    cells : Cells
        Which sections the blob has, and of how many cells. Those that the geometry lacks are None.

    Attributes
    ----------
    nbytes : int
        Length of the blob.
    """

    def __init__(self, geometry: Geometry, cells: Cells) -> None:
        self.geometry, self.cells = geometry, cells
        self._headers: list[tuple[int, bytes]] = []
        self._at = struct.calcsize("<Ii")
        self._rows = self._section(geometry.rows, cells.rows, "")
        self._window = self._section(geometry.window, cells.window, "window.")
        self._recurrent: list[tuple[str, Part, int]] = []
        self._recurrent_at = self._at
        if geometry.recurrent is not None and cells.recurrent is not None:
            self._place_recurrent(cells.recurrent)
        self.nbytes = self._at

    def _put(self, header: bytes) -> None:
        self._headers.append((self._at, header))
        self._at += len(header)

    def _section(self, attention: Attention | None, cells: int | None, prefix: str) -> _Section:
        if attention is None or cells is None:
            return _Section(self._at, 0, [])
        geometry = self.geometry
        self._put(struct.pack("<II", 1, cells))
        section = _Section(self._at, cells, [])
        if not cells:
            return section
        self._at += cells * geometry.cell.itemsize
        body = struct.pack("<II", attention.transposed, len(attention.keys))
        self._put(body + (struct.pack("<II", *attention.rotation) if geometry.version >= 4 else b""))
        at, headers, parts = self._at, self._headers, section.parts
        for header, length, stream, row_bytes in _in_blob(attention, prefix):
            headers.append((at, header))
            at += length
            parts.append((stream, at))
            at += row_bytes * cells
        self._at = at
        return section

    def _place_recurrent(self, cells: int) -> None:
        recurrent = self.geometry.recurrent
        assert recurrent is not None
        self._put(struct.pack("<I", cells))
        self._recurrent_at = self._at
        self._at += cells * struct.calcsize("<iI")
        self._put(struct.pack("<II", 0, recurrent.layers))
        for name, part in recurrent.named():
            self._put(_part_header(part, transposed=False))
            if cells and part.row_bytes:
                self._recurrent.append((name, part, self._at))
                self._at += part.row_bytes

    def _table(self, blob: Buffer, section: _Section) -> npt.NDArray[np.void]:
        cell = self.geometry.cell
        return blob[section.table : section.table + section.cells * cell.itemsize].view(cell)

    def write(self, blob: Buffer, seq_id: int, stop: int, tokens: TokenArray) -> None:
        """Write everything but rows and states: each section ends before position `stop` of a sequence.

        Parameters
        ----------
        blob : uint8[nbytes]
            Where to.
        seq_id : int
            The sequence that is going to read it.
        stop : int
            The position after the last one.
        tokens : uint32 array
            The sequence's tokens, at least `stop` of them; M-RoPE cells hold theirs.
        """
        self._check_size(blob)
        into = blob.data
        for offset, header in ((0, struct.pack("<Ii", MAGIC, seq_id)), *self._headers):
            into[offset : offset + len(header)] = header
        for section in (self._rows, self._window):
            table = self._table(blob, section)
            table["sequences"] = 1
            table["sequence"] = seq_id
        self.place(blob, stop, tokens)

    def place(self, blob: Buffer, stop: int, tokens: TokenArray) -> None:
        """Write the positions anew, and tokens where cells hold them: for a blob that was written, and is to end elsewhere."""
        for section in (self._rows, self._window):
            if not section.cells:
                continue
            table = self._table(blob, section)
            table["position"] = np.arange(stop - section.cells, stop, dtype="<i4")
            if self.geometry.mrope:
                table["x"] = table["y"] = table["position"]
                table["token"] = tokens[stop - section.cells : stop]
        if self.cells.recurrent:
            self._recurrent_head(blob)[...] = (stop - 1, 0)

    def check(self, blob: Buffer, seq_id: int, stop: int, *, at: int) -> dict[str, npt.NDArray[np.intp] | None]:
        """Check everything but rows and states: the sections have to end before position `stop` of a sequence.

        Parameters
        ----------
        blob : uint8[nbytes]
            What to check.
        seq_id : int
            The sequence that it is of.
        stop : int
            The position after the last one of the cells.
        at : int
            The position after that of the recurrent part, if there is one.

        Returns
        -------
        dict of str to (None or ndarray)
            For `rows` and `window`: None when the cells come in the order of their positions. Else the order in which to take
            them: a cache whose cells were used before fills the holes first.

        Raises
        ------
        BlobError
            When one byte is not as expected, or the positions are others, incomplete or not unique.
        """
        self._check_size(blob)
        for offset, header in ((0, struct.pack("<Ii", MAGIC, seq_id)), *self._headers):
            if blob[offset : offset + len(header)].tobytes() != header:
                raise BlobError(f"the blob's header at offset {offset} is not the one expected of this context")
        if self.cells.recurrent and tuple(self._recurrent_head(blob).tolist()) != (at - 1, 0):
            raise BlobError(f"the recurrent state is of position {self._recurrent_head(blob)[0]}, expected {at - 1}")
        return {
            "rows": self._order(blob, self._rows, seq_id, stop),
            "window": self._order(blob, self._window, seq_id, stop, loose=self.cells.rows is not None),
        }

    def _order(
        self, blob: Buffer, section: _Section, seq_id: int, stop: int, *, loose: bool = False
    ) -> npt.NDArray[np.intp] | None:
        if not section.cells:
            return None
        table = self._table(blob, section)
        if (table["sequences"] != 1).any() or (table["sequence"] != seq_id).any():
            raise BlobError("the blob's cells belong to other sequences")
        positions = table["position"]
        if self.geometry.mrope and (
            (table["x"] != positions).any() or (table["y"] != positions).any() or (table["token"] < 0).any()
        ):
            raise BlobError("some cells are not of text (an image's M-RoPE positions), which this adapter does not take")
        wanted = np.arange(stop - section.cells, stop, dtype="<i4")
        if loose or np.array_equal(positions, wanted):  # a window beside rows is whatever it still holds of their range
            return None
        order = np.argsort(positions, kind="stable")
        if not np.array_equal(positions[order], wanted):
            raise BlobError(
                f"the blob holds positions {positions.min()} to {positions.max()}, not each of [{stop - section.cells}, {stop})"
            )
        return order

    def streams(self, blob: Buffer) -> dict[str, Array]:
        """View the attention rows as the streams of the layout, in layout order; writes go to the blob."""
        self._check_size(blob)
        cells, parts = self._rows.cells, self._rows.parts
        layers = len(parts) // 2  # keys of all layers, then values
        by_layer = zip(parts[:layers], parts[layers:], strict=True)
        return {stream.name: _view(blob, stream, cells, offset) for pair in by_layer for stream, offset in pair}

    def states(self, blob: Buffer) -> dict[str, Array]:
        """View the window and the recurrent part as the states of the layout, all but the position; writes go to the blob."""
        self._check_size(blob)
        views = {stream.name: _view(blob, stream, self._window.cells, offset) for stream, offset in self._window.parts}
        named = {state.name: state for state in self.geometry.states()}
        for name, _, offset in self._recurrent:
            views[name] = _state_view(blob, named[name], offset)
        return {name: views[name] for name in named if name != POSITION and name in views}

    def _recurrent_head(self, blob: Buffer) -> npt.NDArray[np.int32]:
        return blob[self._recurrent_at : self._recurrent_at + 8].view("<i4")

    def _check_size(self, blob: Buffer) -> None:
        if blob.size != self.nbytes:
            raise BlobError(f"a blob with {self.cells} of this context has {self.nbytes} bytes, got {blob.size}")


def fit(geometry: Geometry, rows: int | None, recurrent: int, nbytes: int) -> Frame:
    """Find the frame of a blob of `nbytes`: how many cells its window has, if the model has one, follows from that.

    Raises
    ------
    BlobError
        When no number of them gives that many bytes.
    """
    cells = Cells(rows if geometry.rows else None, None, recurrent if geometry.recurrent else None)
    if geometry.window is None:
        frame = Frame(geometry, cells)
        if frame.nbytes != nbytes:
            raise BlobError(f"the sequence's blob has {nbytes} bytes, expected {frame.nbytes}: it lacks some of the positions")
        return frame
    none, one, two = (Frame(geometry, cells._replace(window=n)).nbytes for n in range(3))
    window = 0 if nbytes == none else (nbytes - one) // (two - one) + 1
    if 0 <= window <= geometry.window_cells:
        frame = Frame(geometry, cells._replace(window=window))
        if frame.nbytes == nbytes:
            return frame
    raise BlobError(
        f"the sequence's blob has {nbytes} bytes, which no window of 0 to {geometry.window_cells} positions gives beside "
        f"{rows or 'no'} rows: it lacks some of the positions"
    )


# Frames are made with every call, and of a section with K and V of many layers nothing but the places changes.
@lru_cache(maxsize=64)
def _in_blob(attention: Attention, prefix: str) -> list[tuple[bytes, int, Stream, int]]:
    """Header, its length, stream and bytes of a row, for each part of a section in the order of the blob."""
    streams = attention.streams(prefix)  # K and V by turns
    found = []
    for which, parts in enumerate((attention.keys, attention.values)):
        for part, stream in zip(parts, streams[which::2], strict=True):
            header = _part_header(part, transposed=which == 1 and attention.transposed)
            found.append((header, len(header), stream, part.row_bytes))
    return found


def _view(blob: Buffer, stream: Stream, cells: int, offset: int) -> Array:
    return np.ndarray(stream.array_shape(cells), stream.view_dtype, buffer=blob.data, offset=offset)


def _state_view(blob: Buffer, state: State, offset: int) -> Array:
    return np.ndarray(state.array_shape, state.view_dtype, buffer=blob.data, offset=offset)


def _part_header(part: Part, *, transposed: bool) -> bytes:
    if transposed:
        return struct.pack("<iII", part.ggml_type, part.element_bytes, part.elements)
    return struct.pack("<iQ", part.ggml_type, part.row_bytes)
