"""The closed list of dtype labels: how many bytes a group of elements takes, and how numpy may look at them.

A label is identity: two labels of the same size never match each other. numpy's dtypes are only views; where numpy has
none (bf16, f8), the raw bits are viewed as unsigned integers of the same size, and packed or quantised formats as bytes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import LayoutError, MissingPackageError

__all__ = ["DTYPES", "DType", "dtype_of", "typed"]


@dataclass(frozen=True, slots=True)
class DType:
    """One label of the list.

    Attributes
    ----------
    label : str
        The name in a layout. On disk.
    group : int
        Elements that are stored together (32 for ggml's quantised types, 2 for 4-bit integers, else 1). They lie along
        the last axis.
    group_bytes : int
        Bytes of one group.
    view : numpy.dtype
        What an array of this label looks like in numpy. For packed types it is uint8 and the last axis counts bytes.
    """

    label: str
    group: int
    group_bytes: int
    view: np.dtype[np.generic]

    @property
    def packed(self) -> bool:
        """Whether elements share bytes, so that the last axis of a view counts bytes instead of elements."""
        return self.group > 1

    def accepts(self, dtype: np.dtype[np.generic]) -> bool:
        """Whether an array of this numpy dtype holds elements of this label.

        The view's own dtype is accepted, and an extension type whose name is the label's (ml_dtypes' bfloat16, for bf16).
        """
        return dtype == self.view or (dtype.name == _EXTENSION_NAMES.get(self.label) and dtype.itemsize == self.group_bytes)


# numpy names of the extension types (as ml_dtypes registers them) that carry the same bits as a label
_EXTENSION_NAMES = {
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
}

# (label, elements in a group, bytes of a group, numpy view). On disk: labels are only ever added, never changed.
# The quantised sizes are those of ggml's block_* structs (ggml-common.h).
_TABLE: tuple[tuple[str, int, int, str], ...] = (
    ("f64", 1, 8, "<f8"),
    ("f32", 1, 4, "<f4"),
    ("f16", 1, 2, "<f2"),
    ("bf16", 1, 2, "<u2"),
    ("f8_e4m3", 1, 1, "u1"),
    ("f8_e5m2", 1, 1, "u1"),
    ("f8_e4m3fnuz", 1, 1, "u1"),
    ("f8_e5m2fnuz", 1, 1, "u1"),
    ("e8m0", 1, 1, "u1"),
    ("i64", 1, 8, "<i8"),
    ("i32", 1, 4, "<i4"),
    ("i16", 1, 2, "<i2"),
    ("i8", 1, 1, "i1"),
    ("u64", 1, 8, "<u8"),
    ("u32", 1, 4, "<u4"),
    ("u16", 1, 2, "<u2"),
    ("u8", 1, 1, "u1"),
    ("i4", 2, 1, "u1"),
    ("u4", 2, 1, "u1"),
    ("f4_e2m1", 2, 1, "u1"),
    ("q4_0", 32, 18, "u1"),
    ("q4_1", 32, 20, "u1"),
    ("q5_0", 32, 22, "u1"),
    ("q5_1", 32, 24, "u1"),
    ("q8_0", 32, 34, "u1"),
    ("q8_1", 32, 36, "u1"),
    ("iq4_nl", 32, 18, "u1"),
    ("mxfp4", 32, 17, "u1"),
)

DTYPES: dict[str, DType] = {label: DType(label, group, size, np.dtype(view)) for label, group, size, view in _TABLE}


def dtype_of(label: str) -> DType:
    """Look a label up.

    Raises
    ------
    LayoutError
        When the label is not on the list.
    """
    try:
        return DTYPES[label]
    except (KeyError, TypeError):
        raise LayoutError(f"unknown dtype {label!r}; the labels are {', '.join(DTYPES)}") from None


def typed(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], label: str) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """View the raw elements of a label as the type that they are of, where numpy has it or ml_dtypes adds it.

    bf16 and the 8-bit floats are handed out as unsigned integers; this makes numbers of them, without a copy. Labels that numpy has
    itself, and packed ones, for which nobody has a type, come back as they are.

    Parameters
    ----------
    array : ndarray
        As the store hands it out: of the label's view dtype, any strides.
    label : str
        A label of `DTYPES`.

    Raises
    ------
    LayoutError
        When the label is not on the list, or the array isn't of its view dtype.
    MissingPackageError
        When the type is one of ml_dtypes', which isn't installed (`pip install "kvstore[ml_dtypes]"`).
    """
    dtype = dtype_of(label)
    if not dtype.accepts(array.dtype):
        raise LayoutError(f"an array of dtype {label} is handed out as numpy {dtype.view}, got {array.dtype}")
    name = _EXTENSION_NAMES.get(label)
    if name is None or array.dtype.name == name:
        return array
    try:
        types = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise MissingPackageError(f'dtype {label} is a type of ml_dtypes; install it: pip install "kvstore[ml_dtypes]"') from error
    return array.view(getattr(types, name))
