"""Layouts: what a session's state consists of, and how it lies in a block."""

from kvstore.layout.dtypes import DTYPES, DType, dtype_of, typed
from kvstore.layout.layout import LAYOUT_VERSION, SEGMENT_ALIGN, Layout
from kvstore.layout.oracle import StateHash, state_hash
from kvstore.layout.parts import State, Stream

__all__ = [
    "DTYPES",
    "LAYOUT_VERSION",
    "SEGMENT_ALIGN",
    "DType",
    "Layout",
    "State",
    "StateHash",
    "Stream",
    "dtype_of",
    "state_hash",
    "typed",
]
