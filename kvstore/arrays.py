"""The engine's arrays of a stream, whole or in pages, checked against the layout and described to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ArrayError
from kvstore.kernel import Rows
from kvstore.layout import Layout, Stream

__all__ = ["Array", "Paged", "StreamArray", "check_named", "check_rows", "rows_of", "writeable"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Rows of a stream that lie in pages, as engines with a paged KV cache keep them.

    Attributes
    ----------
    pages : ndarray
        Shaped like the stream's array, with two axes in the place of the token axis: pages, and rows in a page. Any strides.
    slots : ndarray of int64 or int32
        For each row, in order of position: its page times the rows of a page, plus its place in the page. One slot table may
        serve all streams; if it owns its memory, is int64 and not writeable, it is checked once and not copied.
    """

    pages: Array
    slots: npt.NDArray[np.int64] | npt.NDArray[np.int32]


StreamArray: TypeAlias = Array | Paged


def check_named(layout: Layout, arrays: Mapping[str, object], *, all_of_them: bool) -> None:
    """Refuse names that the layout has no streams for and, if asked, streams that are missing. Raises ArrayError."""
    names = {stream.name for stream in layout.streams}
    missing, extra = sorted(names - set(arrays)) if all_of_them else [], sorted(set(arrays) - names)
    if missing or extra:
        needs = "every stream of the layout and nothing else" if all_of_them else "streams of the layout"
        raise ArrayError(f"expected arrays for {needs}: missing {missing}, unknown {extra}; the layout has {sorted(names)}")


def check_rows(stream: Stream, array: StreamArray, tokens: int, *, exact: bool) -> None:
    """Refuse what does not hold the rows of `tokens` positions of a stream (or, if not `exact`, at least those).

    Raises
    ------
    ArrayError
        Names the stream, what came and what was expected.
    """
    if not isinstance(array, Paged):
        stream.check_array(array, tokens, exact=exact)
        return
    pages, axis = array.pages, stream.token_axis
    if not isinstance(pages, np.ndarray) or pages.ndim != len(stream.row_shape) + 2:
        raise ArrayError(
            f"stream {stream.name!r}: pages are an array of {len(stream.row_shape) + 2} axes, "
            f"got {getattr(pages, 'shape', type(pages).__name__)}"
        )
    one_page = pages[(slice(None),) * axis + (0,)] if pages.shape[axis] else pages
    if not pages.shape[axis] or not pages.shape[axis + 1]:
        raise ArrayError(f"stream {stream.name!r}: the paged array of shape {pages.shape} has no rows")
    stream.check_array(one_page, one_page.shape[axis] * stream.tokens_per_row)
    slots = np.asarray(array.slots)
    rows = stream.rows(tokens)
    if slots.ndim != 1 or slots.dtype not in (np.int64, np.int32) or slots.size < rows or (exact and slots.size != rows):
        raise ArrayError(
            f"stream {stream.name!r}: expected a slot (int64 or int32) for each of {rows} rows, "
            f"got {slots.dtype} of shape {slots.shape}"
        )
    slots = slots[:rows]  # what lies behind is padding
    count = pages.shape[axis] * pages.shape[axis + 1]
    if rows and not 0 <= int(slots.min()) <= int(slots.max()) < count:
        raise ArrayError(
            f"stream {stream.name!r}: slots from {slots.min()} to {slots.max()}, the pages have slots 0 to {count - 1}"
        )


def writeable(array: StreamArray) -> bool:
    """Whether rows can be written."""
    return (array.pages if isinstance(array, Paged) else array).flags.writeable


def rows_of(stream: Stream, array: StreamArray) -> Rows:
    """Describe a stream's rows to the kernel."""
    if isinstance(array, Paged):
        return Rows.paged(array.pages, array.slots, axis=stream.token_axis, tokens_per_row=stream.tokens_per_row)
    return Rows.strided(array, axis=stream.token_axis, tokens_per_row=stream.tokens_per_row)
