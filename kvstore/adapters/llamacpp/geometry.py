"""What the sequence blobs of one context look like: their sections, as streams and states of a layout.

Everything is little-endian. A blob is a head, then sections, of which a model has some:

========================  ===========================================================================================
head                      u32 magic, i32 sequence id
attention rows            the layers that see every position
window                    the layers of a sliding window, in the same form; only the cells that the window still sees
recurrent                 the recurrent layers, at one position
========================  ===========================================================================================

Attention and window:

==================  =================================================================================================
u32                 number of streams of cells: 1
u32                 cells; nothing follows if there are none
12 bytes each       i32 position, u32 number of sequences: 1, i32 sequence id
or 24 bytes each    M-RoPE: i32 position, u32 number of sequences: 1, i32 x, i32 y, i32 token, i32 sequence id
u32                 whether V is transposed
u32                 layers
u32, u32            rotation of K and of V; in version 4 of the sequence state only
K of each layer     i32 ggml type, u64 bytes of a row, then the rows of all cells
V of each layer     the same; transposed: i32 ggml type, u32 bytes of an element, u32 elements, then [elements][cells]
==================  =================================================================================================

Recurrent:

==================  =================================================================================================
u32                 cells: 1, or 0
8 bytes each        i32 position, u32 0
u32                 whether S is transposed: 0
u32                 layers of the model
R of each layer     i32 ggml type, u64 bytes, the bytes; only recurrent layers, in both
S of each layer     the same
==================  =================================================================================================

With the flag PARTIAL_ONLY the attention rows are left out. `learn` finds out which of these a blob consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvstore.layout import State, Stream, dtype_of

__all__ = ["CELL", "MAGIC", "MROPE_CELL", "POSITION", "TYPES", "Attention", "Geometry", "Part", "Recurrent"]

MAGIC = 0xAF143CD8
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
MROPE_CELL = np.dtype(
    [("position", "<i4"), ("sequences", "<u4"), ("x", "<i4"), ("y", "<i4"), ("token", "<i4"), ("sequence", "<i4")]
)
POSITION = "position"  # the state that says which position the other states are of

# ggml's type ids (ggml.h, enum ggml_type) and the labels of the layout
TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}


@dataclass(frozen=True, slots=True)
class Part:
    """K or V of one layer, or R or S of a recurrent one.

    Attributes
    ----------
    ggml_type : int
        A key of `TYPES`.
    row_bytes : int
        Bytes of one cell. R and S may have none.
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
        """Describe it as a stream of a layout, with a row for each cell."""
        return _stream(name, TYPES[self.ggml_type], self.elements, 1 if transposed else 0)


# Immutable, and asked for with every blob: made and checked anew each time, they took an eighth of a promote.
@lru_cache(maxsize=4096)
def _stream(name: str, dtype: str, elements: int, token_axis: int) -> Stream:
    return Stream(name, dtype, (elements,), token_axis=token_axis)


@lru_cache(maxsize=4096)
def _state(name: str, dtype: str, shape: tuple[int, ...], bounded: tuple[int, ...] = ()) -> State:
    return State(name, dtype, shape, bounded)


@dataclass(frozen=True, slots=True)
class Attention:
    """A section of cells with K and V.

    Attributes
    ----------
    transposed : bool
        Whether V lies [elements][cells], as it does without flash attention.
    rotation : tuple of (int, int)
        The rotation words of K and V; (0, 0) in version 3. Rows of another rotation are accepted in silence, so it is identity.
    keys, values : tuple of Part
        By layer. There may be none: all layers of a model may have the window.
    """

    transposed: bool
    rotation: tuple[int, int]
    keys: tuple[Part, ...]
    values: tuple[Part, ...]

    def streams(self, prefix: str = "") -> tuple[Stream, ...]:
        """Describe K and V of each layer, first layer first, as streams."""
        return _streams(self, prefix)

    def identity(self, prefix: str) -> dict[str, str | int]:
        """Say what of it names a layout, beside the streams."""
        return {
            f"{prefix}v_trans": int(self.transposed),
            f"{prefix}rotation_k": self.rotation[0],
            f"{prefix}rotation_v": self.rotation[1],
        }


@lru_cache(maxsize=64)
def _streams(attention: Attention, prefix: str) -> tuple[Stream, ...]:
    return tuple(
        part.stream(f"{prefix}{kind}.{layer}", transposed=kind == "v" and attention.transposed)
        for layer, pair in enumerate(zip(attention.keys, attention.values, strict=True))
        for kind, part in zip("kv", pair, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The section of the recurrent layers.

    Attributes
    ----------
    layers : int
        Layers of the model, those that are not recurrent among them.
    shorts, states : tuple of Part
        R (the convolution's history) and S (the recurrent state) of each recurrent layer.
    """

    layers: int
    shorts: tuple[Part, ...]
    states: tuple[Part, ...]

    def named(self) -> Iterator[tuple[str, Part]]:
        """Every part in the order of the blob, with its name."""
        for kind, parts in (("r", self.shorts), ("s", self.states)):
            for layer, part in enumerate(parts):
                yield f"{kind}.{layer}", part


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about the blobs of a context that does not depend on the sequence or its length.

    Attributes
    ----------
    version : int
        Version of the sequence state: 4 with the two rotation words, 3 without, 0 where no section shows it.
    mrope : bool
        Whether cells hold M-RoPE positions and tokens.
    rows : Attention or None
        The attention rows, if the model has them.
    window : Attention or None
        The sliding window's section, if the model has one.
    window_cells : int
        Positions of the window, as the model has it; 0 without.
    recurrent : Recurrent or None
        The recurrent section, if the model has one.
    """

    version: int
    mrope: bool
    rows: Attention | None
    window: Attention | None = None
    window_cells: int = 0
    recurrent: Recurrent | None = None

    @property
    def cell(self) -> np.dtype[np.void]:
        """What a cell of attention looks like."""
        return MROPE_CELL if self.mrope else CELL

    @property
    def partial(self) -> bool:
        """Whether there is anything that is valid at one position only."""
        return self.window is not None or self.recurrent is not None

    def streams(self) -> tuple[Stream, ...]:
        """Describe the attention rows as the streams of a layout."""
        return self.rows.streams() if self.rows is not None else ()

    def states(self) -> tuple[State, ...]:
        """Describe the window and the recurrent part as the states of a layout.

        The window's states are bounded by the model's window and nothing else, so they don't depend on the context's size.
        """
        if not self.partial:
            return ()
        states = [_state(POSITION, "u32", (1,))]
        if self.window is not None:
            states += [
                _state(
                    s.name,
                    s.dtype,
                    (*s.row_shape[: s.token_axis], self.window_cells, *s.row_shape[s.token_axis :]),
                    (s.token_axis,),
                )
                for s in self.window.streams("window.")
            ]
        if self.recurrent is not None:
            states += [
                _state(name, TYPES[part.ggml_type], (part.elements,)) for name, part in self.recurrent.named() if part.row_bytes
            ]
        return tuple(states)

    def identity(self) -> dict[str, str | int]:
        """Say what of it names a layout, beside the streams and states."""
        named: dict[str, str | int] = {}
        if self.version:
            named["llamacpp.seq_version"] = self.version
        if self.rows is not None:
            named.update(self.rows.identity("llamacpp."))
        if self.mrope:
            named["llamacpp.mrope"] = 1
        if self.window is not None:
            named["llamacpp.window"] = self.window_cells
            named.update(self.window.identity("llamacpp.window_"))
        if self.recurrent is not None:
            named["llamacpp.recurrent"] = self.recurrent.layers
        return named
