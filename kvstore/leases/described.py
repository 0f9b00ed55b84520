"""The caller's arrays, checked against the layout and described to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.arrays import Array, Paged, StreamArray, check_named, check_rows, rows_of, writeable
from kvstore.errors import ArrayError
from kvstore.kernel import Rows, address_of
from kvstore.layout import Layout

__all__ = ["Described", "describe"]


def describe(layout: Layout, arrays: Mapping[str, StreamArray], tokens: int) -> list[Rows]:
    """Check destinations for the rows of so many positions.

    Returns
    -------
    list of Rows
        One for each stream of the layout; skipped where no array is given or there are no rows.

    Raises
    ------
    ArrayError
        Says by name what doesn't fit.
    """
    check_named(layout, arrays, all_of_them=False)
    rows = []
    for stream in layout.streams:
        array = arrays.get(stream.name)
        if array is not None:
            check_rows(stream, array, tokens, exact=False)
            if not writeable(array):
                raise ArrayError(f"stream {stream.name!r}: the destination is read-only")
        if array is None or not stream.rows(tokens):
            rows.append(Rows.skip(row_bytes=stream.row_bytes, tokens_per_row=stream.tokens_per_row))
        else:
            rows.append(rows_of(stream, array))
    return rows


class Described:
    """Destinations as `describe` gives them, remembered for the next call: who restores piece by piece comes with the same arrays.

    What is remembered keeps the arrays alive until other ones come or it is forgotten. Pages are never remembered: their
    slots may change in place. Not thread-safe.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._tokens = -1
        self._arrays: dict[str, tuple[Array, int, np.dtype[Any], tuple[int, ...], tuple[int, ...]]] = {}
        self._rows: list[Rows] = []

    def rows(self, arrays: Mapping[str, StreamArray], tokens: int) -> list[Rows]:
        """See `describe`."""
        if tokens == self._tokens and len(arrays) == len(self._arrays) and all(map(self._known, arrays.items())):
            return self._rows
        self.forget()
        rows = describe(self._layout, arrays, tokens)
        known = {name: (a, address_of(a), a.dtype, a.shape, a.strides) for name, a in arrays.items() if not isinstance(a, Paged)}
        if len(known) == len(arrays):
            self._tokens, self._arrays, self._rows = tokens, known, rows
        return rows

    def _known(self, given: tuple[str, StreamArray]) -> bool:
        name, array = given
        known = self._arrays.get(name)
        if known is None or known[0] is not array or isinstance(array, Paged):
            return False
        # what an array is can be changed in place; one that owns its memory may even lie elsewhere by now (ndarray.resize)
        _, address, dtype, shape, strides = known
        if array.dtype is not dtype or array.shape != shape or array.strides != strides:
            return False
        flags = array.flags
        return flags.writeable and (not flags.owndata or address_of(array) == address)

    def forget(self) -> None:
        """Let the arrays go."""
        self._tokens, self._arrays, self._rows = -1, {}, []
