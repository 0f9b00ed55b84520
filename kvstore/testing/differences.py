"""Where two sessions differ: which rows of which streams, and which states. For the message of a test that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.layout import Layout, Stream
from kvstore.testing.sessions import Array

__all__ = ["Difference", "differences", "first_rows"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One part in which two sessions differ. Prints as a line.

    Attributes
    ----------
    part : str
        The stream's or state's name.
    rows : tuple of int
        A stream's rows that differ, ascending; empty for a state.
    of : int
        How many rows were compared; 0 for a state.
    tokens_per_row : int
        Positions that one row stands for; row r holds what the positions from r * tokens_per_row on gave.
    detail : str
        What differs in a state: its shape, or how many of its bytes.
    """

    part: str
    rows: tuple[int, ...] = ()
    of: int = 0
    tokens_per_row: int = 1
    detail: str = ""

    def __str__(self) -> str:
        if not self.of:
            return f"{self.part} ({self.detail})"
        first = self.rows[0]
        where = "" if self.tokens_per_row == 1 else f", positions from {first * self.tokens_per_row} on"
        return f"{self.part} (row {first}{where}; {len(self.rows)} of {self.of} rows)"


def differences(
    layout: Layout, a: Mapping[str, Array], b: Mapping[str, Array], length: int, *, start: int = 0
) -> tuple[Difference, ...]:
    """Compare two sessions part by part, byte by byte.

    Where `state_hash` of both is the gate, this says what to look for: a tail that is missing, a row that lies one off, a
    state of another position.

    Parameters
    ----------
    layout : Layout
        Which parts there are.
    a, b : mapping of str to ndarray
        Every stream, with at least the rows of `length` positions, any strides; every state.
    length : int
        Positions to compare.
    start : int
        Rows of spans that are complete at `start` are left out.

    Returns
    -------
    tuple of Difference
        In layout order; empty when all bytes are equal.
    """
    found = []
    for stream in layout.streams:
        first, stop = stream.rows(start), stream.rows(length)
        mine, theirs = (first_rows(stream, arrays[stream.name], stop)[first:] for arrays in (a, b))
        rows = np.flatnonzero((mine != theirs).any(axis=1)) + first
        if rows.size:
            found.append(Difference(stream.name, tuple(rows.tolist()), stop - first, stream.tokens_per_row))
    for state in layout.states:
        one, other = a[state.name], b[state.name]
        if one.shape != other.shape:
            found.append(Difference(state.name, detail=f"shape {one.shape} against {other.shape}"))
        elif (count := int(np.count_nonzero(_bytes(one) != _bytes(other)))) or one.nbytes != other.nbytes:
            found.append(Difference(state.name, detail=f"{count} of {one.nbytes} bytes"))
    return tuple(found)


def first_rows(stream: Stream, array: Array, rows: int) -> npt.NDArray[np.uint8]:
    """The bytes of a stream's first rows, one row a line: uint8[rows, row_bytes], a copy or a view."""
    return _bytes(np.moveaxis(array, stream.token_axis, 0)[:rows]).reshape(rows, stream.row_bytes)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
