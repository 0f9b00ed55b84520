"""The rows of all streams of a call together: what a call has to know of them, worked out once for as many calls as come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel.rows import Rows

__all__ = ["Target", "check_apart", "check_destinations"]


class Target:
    """Rows of each stream, in layout order, with what was worked out of them. Immutable; thread-safe.

    Who copies into the same arrays again and again keeps one: to describe and check sixty streams takes as long as to copy
    several MB. What can change of an array without this noticing (whether it may be written) is looked at with every call.

    Parameters
    ----------
    rows : sequence of Rows
        One for each stream.

    Attributes
    ----------
    rows : tuple of Rows
        As given.
    packed : bytes
        As the kernel takes them, one behind the other. Points into the arrays, which live as long as this does.
    row_bytes, tokens_per_row : int64 array
        Bytes of a row, and tokens that share one, of each stream.
    skipped : bool array
        Which streams are neither copied nor checked.

    Raises
    ------
    TypeError
        Something else is among them.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        for r in rows:
            if not isinstance(r, Rows):
                raise TypeError(f"rows must be Rows objects, not {type(r).__name__}")
        self.rows = tuple(rows)
        self.packed = b"".join([r._packed for r in self.rows])
        self.row_bytes = np.array([r._row_bytes for r in self.rows], np.int64)
        self.tokens_per_row = np.array([r._tokens_per_row for r in self.rows], np.int64)
        self.skipped = np.array([r.skipped for r in self.rows], bool)
        self._room = _room(self.rows)
        self._written: tuple[int, int] | None = None  # see _span; two threads may find it at once, and find the same

    @classmethod
    def of(cls, rows: Sequence[Rows] | Target) -> Target:
        """Make one, unless it is one."""
        return rows if isinstance(rows, Target) else cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def alike(self, other: Target) -> bool:
        """Whether both have the same streams: row for row of one length, for as many tokens."""
        return np.array_equal(self.row_bytes, other.row_bytes) and np.array_equal(self.tokens_per_row, other.tokens_per_row)

    def check_room(self, first: NDArray[np.int64], used: NDArray[np.int64], used_name: str) -> None:
        """Refuse, with ValueError, blocks that are out of step with rows, or beyond the arrays."""
        for per_row, capacity in self._room.items():
            if per_row > 1 and (bad := first % per_row != 0).any():
                i = int(bad.argmax())
                raise ValueError(f"first[{i}] is {first[i]}, not a multiple of the {per_row} tokens of a row")
            if capacity is None:
                continue
            # Each term is below 2**62 after the division or was refused, so that the sum can't wrap.
            start, count = first // per_row, used // per_row
            if (bad := (start > capacity) | (count > capacity - start)).any():
                i = int(bad.argmax())
                raise ValueError(
                    f"block {i} has first {first[i]} and {used_name} {used[i]}, beyond the {capacity} rows "
                    f"of {per_row} tokens that the arrays hold"
                )

    def check(self) -> None:
        """Refuse, with ValueError, what can't be written, and streams of which one would be written over another."""
        for r in self.rows:
            if r._array is not None and not r._array.flags.writeable:
                r._destination()
        self._span()

    def _span(self) -> tuple[int, int]:
        """First byte and end of all that is written, (0, 0) if nothing is; no two streams overlap."""
        if self._written is None:
            _check_rows_apart(self.rows)
            spans = [r._destination() for r in self.rows if r._array is not None]
            self._written = (min(low for low, _ in spans), max(high for _, high in spans)) if spans else (0, 0)
        return self._written


def _room(rows: Sequence[Rows]) -> dict[int, int | None]:
    """The fewest rows that arrays with so many tokens to a row have; None where all such streams are skipped."""
    room: dict[int, int | None] = {}
    for r in rows:
        have = room.get(r._tokens_per_row)
        if r._array is not None and (have is None or r._capacity < have):
            room[r._tokens_per_row] = r._capacity
        else:
            room.setdefault(r._tokens_per_row, None)
    return room


def check_apart(one: Target, other: Target) -> None:
    """Refuse, with ValueError, two targets of which one would be written over the other. Each has passed its own check."""
    (low, high), (other_low, other_high) = one._span(), other._span()
    if low < other_high and other_low < high:
        _check_rows_apart([*one.rows, *other.rows])


def check_destinations(rows: Sequence[Rows]) -> None:
    """Refuse destinations that `scatter` would refuse, also where they are to be written by several calls.

    Raises
    ------
    ValueError
        One is read-only, overlaps itself or overlaps another one.
    """
    Target(rows).check()


# Geometries whose streams were found not to overlap although their extents do, such as keys and values interleaved
# in one array. The finding rests on addresses and strides alone, which the key holds, so that it can't go stale.
_apart: dict[tuple[bytes, tuple[int, ...]], None] = {}


def _check_rows_apart(rows: Sequence[Rows]) -> None:
    spans = sorted((*r._destination(), i) for i, r in enumerate(rows) if r._array is not None)
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return
    paged = any(r._slots is not None for r in rows)
    key = (b"".join([r._packed for r in rows]), tuple(r._capacity for r in rows))
    if not paged and key in _apart:
        return
    open_spans: list[tuple[int, int]] = []
    for low, high, i in spans:
        open_spans = [(end, j) for end, j in open_spans if end > low]
        for _, j in open_spans:
            if _share(rows[i], rows[j]):
                raise ValueError(f"the destinations of streams {min(i, j)} and {max(i, j)} overlap")
        open_spans.append((high, i))
    if not paged:
        while len(_apart) >= 16:
            _apart.pop(next(iter(_apart)), None)
        _apart[key] = None


def _share(a: Rows, b: Rows) -> bool:
    """May two destinations share a byte? Yes in doubt."""
    assert a._array is not None and b._array is not None
    try:
        if not np.shares_memory(a._array, b._array, max_work=1 << 20):  # type: ignore[arg-type]  # stubs: -1 or 0 only
            return False
    except (np.exceptions.TooHardError, OverflowError):
        return True
    same_pages = a._packed[:16] == b._packed[:16] and a._packed[24:] == b._packed[24:]  # all but the slots' address
    if a._slots is None or b._slots is None or not same_pages:
        return True
    return bool(np.isin(a._slots.table, b._slots.table).any())
