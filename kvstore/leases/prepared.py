"""A caller's arrays as the kernel takes them: checked and described, once for a session that goes through them in pieces."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore.arrays import StreamArray, check_named, check_rows, rows_of, writeable
from kvstore.errors import ArrayError
from kvstore.kernel import Rows
from kvstore.layout import Layout

__all__ = ["Prepared", "described"]


def described(layout: Layout, arrays: Mapping[str, StreamArray], tokens: int) -> list[Rows]:
    """Describe destinations for the rows of `tokens` positions: one for each stream of the layout.

    Raises
    ------
    ArrayError
        When one doesn't fit, or can't be written.
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
            continue
        rows.append(rows_of(stream, array))
    return rows


class Prepared:
    """Remembers the last arrays of one lease: describing 60 streams costs more than copying a few megabytes to them.

    Not thread-safe. Keeps the arrays alive, until others come or the lease goes.
    """

    __slots__ = ("_arrays", "_forms", "_layout", "_rows", "_tokens")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._arrays: dict[str, StreamArray] = {}
        self._forms: list[object] = []
        self._tokens = -1
        self._rows: list[Rows] = []

    def rows(self, arrays: Mapping[str, StreamArray], tokens: int) -> list[Rows]:
        """Do as `described`, or return what it returned if the last call had the same arrays."""
        # what can change of an array while it stays the same one; pages are described anew
        forms = [(a.shape, a.strides, a.flags.writeable) if isinstance(a, np.ndarray) else object() for a in arrays.values()]
        same = tokens == self._tokens and forms == self._forms and arrays.keys() == self._arrays.keys()
        if not same or any(arrays[name] is not array for name, array in self._arrays.items()):
            self._tokens = -1
            self._rows = described(self._layout, arrays, tokens)
            self._arrays, self._forms, self._tokens = dict(arrays), forms, tokens
        return self._rows
