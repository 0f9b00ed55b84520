"""The caller's arrays, checked against the layout and described to the kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from kvstore.arrays import Paged, StreamArray, check_named, check_rows, rows_of, writeable
from kvstore.errors import ArrayError
from kvstore.kernel import Rows, Target, address_of
from kvstore.layout import Layout

__all__ = ["Described", "HostBuffer", "describe"]


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


class HostBuffer:
    """Arrays for the rows of some positions, checked against a layout once, to be filled as often as wanted: see `Lease.chunks`.

    Keeps the arrays alive. They must not be changed in what they are (shape, memory, being writeable) while this lives; where one
    that isn't in pages was, it is refused by name when it is to be filled. For one filling at a time, from when it is begun until
    its last chunk was taken or it is closed. Thread-safe.

    Parameters
    ----------
    layout : Layout
        The session's.
    arrays : mapping of str to ndarray or Paged
        Any of the layout's streams, as for `Lease.copy_into`. Of pages the slots count that the table holds now.
    tokens : int
        Positions that they have at least room for, counted from index 0 of each.

    Attributes
    ----------
    layout, arrays, tokens
        As given.

    Raises
    ------
    ArrayError
        Says by name what doesn't fit.
    """

    __slots__ = ("_known", "_owners", "_target", "arrays", "layout", "tokens")

    def __init__(self, layout: Layout, arrays: Mapping[str, StreamArray], tokens: int) -> None:
        if tokens < 1:
            raise ArrayError(f"a buffer has room for 1 position or more, not {tokens}")
        self.layout = layout
        self.arrays: Mapping[str, StreamArray] = MappingProxyType(dict(arrays))
        self.tokens = tokens
        self._target = Target(describe(layout, self.arrays, tokens))
        self._known = [
            (name, a, address_of(a), a.dtype, a.shape, a.strides) for name, a in arrays.items() if not isinstance(a, Paged)
        ]
        # by process: a forked child has memory of its own. Without a lock, since a claim may end in a garbage collection
        self._owners: dict[int, object] = {}

    def target(self) -> Target:
        """Give them as the kernel takes them. Raises ArrayError where an array was changed."""
        if (name := self.changed()) is not None:
            raise ArrayError(f"stream {name!r}: the array was changed in what it is since the buffer was made; make a new one")
        return self._target

    def changed(self) -> str | None:
        """Name an array that isn't any more what it was, if there is one."""
        for name, array, address, dtype, shape, strides in self._known:
            same = array.dtype is dtype and array.shape == shape and array.strides == strides and array.flags.writeable
            if not same or address_of(array) != address:  # it may lie elsewhere by now (ndarray.resize)
                return name
        return None

    def claim(self, owner: object) -> None:
        """Have it for one filling. Raises ArrayError while another one has it."""
        if self._owners.setdefault(os.getpid(), owner) is not owner:
            raise ArrayError(
                "a buffer is in use for other chunks, which weren't all taken or closed; wait for them or use another one"
            )

    def give_back(self, owner: object) -> None:
        """Its filling is over. Does nothing for who doesn't have it."""
        if self._owners.get(os.getpid()) is owner:
            del self._owners[os.getpid()]


class Described:
    """Destinations as `describe` gives them, remembered for the next call: who restores piece by piece comes with the same arrays.

    What is remembered keeps the arrays alive until other ones come or it is forgotten. Pages are never remembered: their
    slots may change in place. Not thread-safe.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last: HostBuffer | None = None

    def target(self, arrays: Mapping[str, StreamArray], tokens: int) -> Target:
        """See `describe`."""
        last = self._last
        if last is not None and last.tokens == tokens and _same(last.arrays, arrays) and last.changed() is None:
            return last.target()
        self.forget()
        if tokens < 1 or any(isinstance(array, Paged) for array in arrays.values()):
            return Target(describe(self._layout, arrays, tokens))
        self._last = HostBuffer(self._layout, arrays, tokens)
        return self._last.target()

    def forget(self) -> None:
        """Let the arrays go."""
        self._last = None


def _same(known: Mapping[str, StreamArray], given: Mapping[str, StreamArray]) -> bool:
    return len(known) == len(given) and all(known.get(name) is array for name, array in given.items())
