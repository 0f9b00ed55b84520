"""Finding out what a context's blobs look like, from the blob of a few cells.

A blob names neither its version nor its sections, so every reading is tried, and exactly one must fit to the last byte.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError
from kvstore.adapters.llamacpp.geometry import CELL, MAGIC, MROPE_CELL, TYPES, Attention, Geometry, Part, Recurrent
from kvstore.layout import dtype_of

__all__ = ["learn"]

_MAX_LAYERS = 2048  # so that a nonsensical count ends the reading at once


class _Reader:
    """Reads a blob front to back; every length is checked before it is used."""

    def __init__(self, blob: npt.NDArray[np.uint8], offset: int = 0) -> None:
        self.blob, self.offset = blob, offset

    @property
    def left(self) -> int:
        return self.blob.size - self.offset

    def skip(self, nbytes: int, what: str) -> int:
        if nbytes > self.left:
            raise BlobError(f"the blob ends inside {what}: {nbytes} bytes needed at offset {self.offset}, {self.left} left")
        self.offset += nbytes
        return self.offset - nbytes

    def read(self, form: str, what: str) -> tuple[int, ...]:
        at = self.skip(struct.calcsize(form), what)
        return struct.unpack_from(form, self.blob.data, at)


def _part(reader: _Reader, what: str, cells: int, *, transposed: bool = False, empty: bool = False) -> Part:
    if transposed:
        kind, element, count = reader.read("<iII", what)
        row = element * count
    else:
        kind, row = reader.read("<iQ", what)
    if kind not in TYPES:
        raise BlobError(f"{what} is of ggml type {kind}, which this adapter does not know; known are {TYPES}")
    dtype = dtype_of(TYPES[kind])
    if (not row and not empty) or row % dtype.group_bytes or (transposed and (dtype.packed or element != dtype.group_bytes)):
        raise BlobError(f"{what} has rows of {row} bytes, which is no whole number of {dtype.label} elements")
    reader.skip(row * cells, what)
    return Part(kind, row)


def _attention(reader: _Reader, seq_id: int, version: int, *, mrope: bool) -> Attention:
    """Read one section of cells with K and V."""
    streams, cells = reader.read("<II", "the head of a section")
    if streams != 1:
        raise BlobError(f"the blob has {streams} streams of cells, not one: the context was made with kv_unified false")
    if not cells:
        raise BlobError("the blob has no cells, so it shows neither types nor shapes")
    cell = MROPE_CELL if mrope else CELL
    at = reader.skip(cells * cell.itemsize, "the cells")
    table = reader.blob[at : reader.offset].view(cell)
    if (table["sequences"] != 1).any() or (table["sequence"] != seq_id).any():
        raise BlobError("the cells are not plain, or belong to several sequences")
    transposed, layers = reader.read("<II", "the header of the layers")
    if transposed > 1 or layers > _MAX_LAYERS:
        raise BlobError(f"the header of the layers reads v_trans {transposed}, {layers} layers")
    rotation = reader.read("<II", "the rotation words") if version >= 4 else (0, 0)
    keys = tuple(_part(reader, f"K of layer {i}", cells) for i in range(layers))
    if layers and not reader.left:
        raise BlobError("the blob has K and no V (an MLA cache), which this adapter does not take")
    values = tuple(_part(reader, f"V of layer {i}", cells, transposed=bool(transposed)) for i in range(layers))
    return Attention(bool(transposed), (rotation[0], rotation[1]), keys, values)


def _recurrent(reader: _Reader) -> Recurrent:
    """Read the recurrent section, which is the last one."""
    (cells,) = reader.read("<I", "the head of the recurrent section")
    if cells != 1:
        raise BlobError(f"the recurrent section has {cells} cells, not one")
    _, sequences = reader.read("<iI", "the recurrent cell")
    transposed, layers = reader.read("<II", "the header of the recurrent layers")
    if sequences or transposed or not 1 <= layers <= _MAX_LAYERS:
        raise BlobError(f"the recurrent section reads {sequences} sequences, s_trans {transposed}, {layers} layers")
    parts: list[Part] = []
    while reader.left:
        parts.append(_part(reader, f"part {len(parts)} of the recurrent section", 1, empty=True))
    if not parts or len(parts) % 2 or len(parts) > 2 * layers or not any(part.row_bytes for part in parts):
        raise BlobError(
            f"the recurrent section has {len(parts)} parts in {layers} layers, not an R and an S for each recurrent one"
        )
    half = len(parts) // 2
    return Recurrent(layers, tuple(parts[:half]), tuple(parts[half:]))


def _read(blob: npt.NDArray[np.uint8], seq_id: int, form: str, version: int, *, mrope: bool) -> Geometry:
    """Read a blob as one that consists of the sections `form`: r(ows), w(indow), s(tates of recurrent layers)."""
    reader = _Reader(blob, struct.calcsize("<Ii"))
    rows = _attention(reader, seq_id, version, mrope=mrope) if "r" in form else None
    window = _attention(reader, seq_id, version, mrope=mrope) if "w" in form else None
    recurrent = _recurrent(reader) if "s" in form else None
    if reader.left:
        raise BlobError(f"{reader.left} bytes follow that are neither rows, nor a window, nor recurrent state as it is known here")
    geometry = Geometry(version, mrope, rows, window, 0, recurrent)
    if not any(section and section.keys for section in (rows, window)) and recurrent is None:
        raise BlobError("the blob has no layers")
    return geometry


# (sections, versions, M-RoPE): what a blob can be read as
_READINGS = [
    *((form, version, mrope) for form in ("r", "rw", "rs", "rws") for version in (3, 4) for mrope in (False, True)),
    ("s", 0, False),
]


def learn(blob: npt.NDArray[np.uint8], seq_id: int, *, window_cells: int = 0) -> Geometry:
    """Read the geometry out of a blob of at least one cell.

    Parameters
    ----------
    blob : uint8[n]
        The whole blob.
    seq_id : int
        The sequence that it is of.
    window_cells : int
        Positions of the model's sliding window; 0 if it has none.

    Raises
    ------
    BlobError
        When it isn't made of the sections that are known, in a known version; says what was found.
    """
    magic, sequence = _Reader(blob).read("<Ii", "the head")
    if magic != MAGIC or sequence != seq_id:
        raise BlobError(f"the blob starts with magic {magic:#x} and sequence {sequence}, expected {MAGIC:#x} and {seq_id}")
    found: dict[tuple[str, int, bool], Geometry] = {}
    problems: dict[str, str] = {}
    for form, version, mrope in _READINGS:
        try:
            found[form, version, mrope] = _read(blob, seq_id, form, version, mrope=mrope)
        except BlobError as error:
            problems.setdefault(str(error), f"{form} version {version}{' M-RoPE' if mrope else ''}")
    if len(found) != 1:
        if found:
            raise BlobError(f"the blob reads alike as {sorted(found)}")
        raise BlobError("; ".join(f"as {reading}: {problem}" for problem, reading in problems.items()))
    geometry = next(iter(found.values()))
    if geometry.window is None:
        return geometry
    if window_cells < 1:
        raise BlobError("the blob has two sections of cells, and the model no sliding window: state of a kind unknown here")
    return replace(geometry, window_cells=window_cells)
