"""What the sequence blobs of one context look like: learned once, from the blob of a few cells.

Offsets, little-endian, of the only form that this adapter takes (one stream, attention only):

==================  =================================================================================================
u32                 magic
i32                 sequence id
u32                 number of streams: 1
u32                 cells
12 bytes each       i32 position, u32 number of sequences: 1, i32 sequence id
u32                 whether V is transposed
u32                 layers
u32, u32            rotation of K and of V; in version 4 of the sequence state only
K of each layer     i32 ggml type, u64 bytes of a row, then the rows of all cells
V of each layer     the same; transposed: i32 ggml type, u32 bytes of an element, u32 elements, then [elements][cells]
==================  =================================================================================================

A blob does not carry its version, so both are tried on the first blob, and exactly one must fit it to the last byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError
from kvstore.layout import Stream, dtype_of

__all__ = ["CELL", "MAGIC", "TYPES", "Geometry", "Part", "learn"]

MAGIC = 0xAF143CD8
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_MAX_LAYERS = 2048  # so that a nonsensical count ends the reading at once

# ggml's type ids (ggml.h, enum ggml_type) and the labels of the layout
TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}


@dataclass(frozen=True, slots=True)
class Part:
    """K or V of one layer.

    Attributes
    ----------
    ggml_type : int
        A key of `TYPES`.
    row_bytes : int
        Bytes of one cell.
    """

    ggml_type: int
    row_bytes: int

    @property
    def elements(self) -> int:
        """Elements of one cell."""
        dtype = dtype_of(TYPES[self.ggml_type])
        return self.row_bytes // dtype.group_bytes * dtype.group

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; for types that are not packed only."""
        return dtype_of(TYPES[self.ggml_type]).group_bytes

    def stream(self, name: str, *, transposed: bool) -> Stream:
        """Describe it as a stream of a layout."""
        return Stream(name, TYPES[self.ggml_type], (self.elements,), token_axis=1 if transposed else 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about the blobs of a context that does not depend on the sequence or its length.

    Attributes
    ----------
    version : int
        Version of the sequence state: 4 with the two rotation words, else 3.
    transposed : bool
        Whether V lies [elements][cells], as it does without flash attention.
    rotation : tuple of (int, int)
        The rotation words of K and V; (0, 0) in version 3. Rows of another rotation are accepted in silence, so it is identity.
    keys, values : tuple of Part
        By layer.
    """

    version: int
    transposed: bool
    rotation: tuple[int, int]
    keys: tuple[Part, ...]
    values: tuple[Part, ...]

    def streams(self) -> tuple[Stream, ...]:
        """Describe K and V of each layer, first layer first, as the streams of a layout."""
        return tuple(
            part.stream(f"{kind}.{layer}", transposed=kind == "v" and self.transposed)
            for layer, pair in enumerate(zip(self.keys, self.values, strict=True))
            for kind, part in zip("kv", pair, strict=True)
        )

    def identity(self) -> dict[str, str | int]:
        """Say what of it names a layout, beside the streams."""
        return {
            "llamacpp.seq_version": self.version,
            "llamacpp.v_trans": int(self.transposed),
            "llamacpp.rotation_k": self.rotation[0],
            "llamacpp.rotation_v": self.rotation[1],
        }


class _Reader:
    """Reads a blob front to back; every length is checked before it is used."""

    def __init__(self, blob: npt.NDArray[np.uint8]) -> None:
        self.blob, self.offset = blob, 0

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


def _part(reader: _Reader, what: str, cells: int, *, transposed: bool) -> Part:
    if transposed:
        kind, element, count = reader.read("<iII", what)
        row = element * count
    else:
        kind, row = reader.read("<iQ", what)
    if kind not in TYPES:
        raise BlobError(f"{what} is of ggml type {kind}, which this adapter does not know; known are {TYPES}")
    dtype = dtype_of(TYPES[kind])
    if not row or row % dtype.group_bytes or (transposed and (dtype.packed or element != dtype.group_bytes)):
        raise BlobError(f"{what} has rows of {row} bytes, which is no whole number of {dtype.label} elements")
    reader.skip(row * cells, what)
    return Part(kind, row)


def _body(blob: npt.NDArray[np.uint8], offset: int, cells: int, version: int) -> Geometry:
    reader = _Reader(blob)
    reader.offset = offset
    transposed, layers = reader.read("<II", "the header of the layers")
    if transposed > 1 or not 1 <= layers <= _MAX_LAYERS:
        raise BlobError(f"the header of the layers reads v_trans {transposed}, {layers} layers")
    rotation = reader.read("<II", "the rotation words") if version >= 4 else (0, 0)
    keys = tuple(_part(reader, f"K of layer {i}", cells, transposed=False) for i in range(layers))
    if not reader.left:
        raise BlobError("the blob has K and no V (an MLA cache), which this adapter does not take")
    values = tuple(_part(reader, f"V of layer {i}", cells, transposed=bool(transposed)) for i in range(layers))
    if reader.left:
        raise BlobError(f"{reader.left} bytes follow the attention section: a sliding window or recurrent state")
    return Geometry(version, bool(transposed), (rotation[0], rotation[1]), keys, values)


def learn(blob: npt.NDArray[np.uint8], seq_id: int) -> Geometry:
    """Read the geometry out of a blob of at least one cell.

    Parameters
    ----------
    blob : uint8[n]
        The whole blob.
    seq_id : int
        The sequence that it is of.

    Raises
    ------
    BlobError
        When it is anything but one stream of attention rows in a known version; says what was found.
    """
    reader = _Reader(blob)
    magic, sequence, streams = reader.read("<IiI", "the header")
    if magic != MAGIC or sequence != seq_id:
        raise BlobError(f"the blob starts with magic {magic:#x} and sequence {sequence}, expected {MAGIC:#x} and {seq_id}")
    if streams != 1:
        raise BlobError(f"the blob has {streams} streams of cells, not one: the context was made with kv_unified false")
    (cells,) = reader.read("<I", "the number of cells")
    if not cells:
        raise BlobError("the blob has no cells, so it shows neither types nor shapes")
    at = reader.skip(cells * CELL.itemsize, "the cells")
    table = blob[at : at + cells * CELL.itemsize].view(CELL)
    if (table["sequences"] != 1).any() or (table["sequence"] != seq_id).any():
        raise BlobError("the cells are not plain (M-RoPE positions?), or belong to several sequences")
    found: dict[int, Geometry] = {}
    problems: list[str] = []
    for version in (3, 4):
        try:
            found[version] = _body(blob, reader.offset, cells, version)
        except BlobError as error:
            problems.append(f"as version {version}: {error}")
    if len(found) != 1:
        raise BlobError("; ".join(problems) or "the blob reads as version 3 and as version 4 alike")
    return next(iter(found.values()))
