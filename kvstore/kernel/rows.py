"""The engine's side of a copy: where the rows of a stream lie in its arrays."""

import math
import struct
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from kvstore.kernel._native import ffi, lib

__all__ = ["Rows", "address_of"]

_MAX_DIMS: int = lib.KVS_MAX_DIMS
# struct kvs_rows: base, row_stride, slots, page_rows, page_stride, tokens_per_row, row_bytes, run_bytes, outer, inner,
# shape[8], stride[8].
_PACK_HEAD, _PACK_REST = struct.Struct("=QqQ").pack, struct.Struct("=23q").pack
if _MAX_DIMS != 8 or struct.calcsize("=QqQ23q") != ffi.sizeof("kvs_rows"):
    raise ImportError("kvstore.kernel and its compiled part are of different versions: rebuild the package")
_PADDING = tuple((0,) * n for n in range(_MAX_DIMS + 1))

Array = np.ndarray[Any, np.dtype[Any]]


_ADDRESS, _BYTES = ffi.typeof("uintptr_t"), ffi.typeof("char[]")
_FIRST = tuple((slice(0, 1),) * n for n in range(65))  # the first element of an array of n axes, as an array


def address_of(array: Array) -> int:
    """Return where an array's first element lies.

    Its array interface says so too, but takes six times as long: it describes the dtype's fields as well.
    """
    try:
        run = array if array.flags.c_contiguous else array[_FIRST[array.ndim]]
        return int(ffi.cast(_ADDRESS, ffi.from_buffer(_BYTES, run)))
    except (BufferError, TypeError, ValueError):  # dtypes that Python's buffers can't tell of
        address: int = array.__array_interface__["data"][0]
        return address


class _Slots:
    """A checked slot table: an int64 copy of the caller's, or the caller's own where that can't change."""

    __slots__ = ("__weakref__", "_distinct", "address", "high", "low", "table")

    def __init__(self, slots: Array) -> None:
        if not isinstance(slots, np.ndarray) or slots.ndim != 1 or slots.dtype not in (np.int64, np.int32):
            came = f"{slots.dtype} of shape {slots.shape}" if isinstance(slots, np.ndarray) else type(slots).__name__
            raise TypeError(f"slots must be a one-dimensional array of int64 or int32, not {came}")
        flags = slots.flags
        shared = not flags.writeable and flags.owndata and flags.c_contiguous and slots.dtype == np.int64
        self.table = slots if shared else np.array(slots, np.int64)
        self.address: int = address_of(self.table)
        self.low = int(self.table.min()) if self.table.size else 0
        self.high = int(self.table.max()) if self.table.size else -1
        self._distinct: bool | None = None

    def distinct(self) -> bool:
        """Is no slot named twice?"""
        if self._distinct is None:
            ordered = np.sort(self.table)
            self._distinct = not bool((ordered[1:] == ordered[:-1]).any())
        return self._distinct


# All streams of a model mostly share one table, and checking it costs more than the rest of `Rows.paged`. An entry
# lives as long as rows made of it do, and keeps the table alive, so that its id can't come to mean another one.
_frozen_slots: weakref.WeakValueDictionary[int, _Slots] = weakref.WeakValueDictionary()


def _slots_of(slots: Array) -> _Slots:
    known = _frozen_slots.get(id(slots))
    if known is not None and known.table is slots:
        return known
    checked = _Slots(slots)
    if checked.table is slots:
        _frozen_slots[id(slots)] = checked
    return checked


def _coalesced(shape: Iterable[int], strides: Iterable[int]) -> tuple[list[int], list[int]]:
    """Drop dimensions of one element and join neighbours that are one run of memory."""
    out_shape: list[int] = []
    out_strides: list[int] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if out_shape and out_strides[-1] == n * stride:
            out_shape[-1] *= n
            out_strides[-1] = stride
        else:
            out_shape.append(n)
            out_strides.append(stride)
    return out_shape, out_strides


@lru_cache(maxsize=1024)
def _geometry(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    contiguous: bool,
    axis: int,
    taken: int,
    tokens_per_row: int,
) -> tuple[int, int, bytes]:
    """Row stride, bytes of a row, and struct kvs_rows from `page_rows` on: what doesn't depend on where an array lies.

    The streams of a model mostly have one geometry or two, in every call, and working one out costs more than all the rest.

    Parameters
    ----------
    contiguous : bool
        Whether the array is C-contiguous and not in pages: as most are; strides of axes of one element mean nothing then.
    axis, taken : int
        The token axis, and how many axes stand in its place: 2 for pages.
    """
    row_stride, run = strides[axis + taken - 1], itemsize
    if contiguous:
        run *= math.prod(shape[axis + 1 :])
        row_stride, places = run, math.prod(shape[:axis])
        outer, outer_strides = ([], []) if places == 1 else ([places], [run * shape[axis]])
        inner: list[int] = []
        inner_strides: list[int] = []
    else:
        outer, outer_strides = _coalesced(shape[:axis], strides[:axis])
        inner, inner_strides = _coalesced(shape[axis + taken :], strides[axis + taken :])
        if inner and inner_strides[-1] == run:
            run *= inner.pop()
            inner_strides.pop()
    row_bytes = run * math.prod(outer) * math.prod(inner)
    used = len(outer) + len(inner)
    if used > _MAX_DIMS and row_bytes:
        raise ValueError(f"{used} axes besides the token axis can't be joined to {_MAX_DIMS} or fewer")
    rest = _PADDING[max(0, _MAX_DIMS - used)]
    rows_of_page = shape[axis + 1] if taken == 2 else 0
    numbers = (rows_of_page, strides[axis], _checked_tokens_per_row(tokens_per_row), row_bytes, run, len(outer), len(inner))
    packed = _PACK_REST(*numbers, *outer, *inner, *rest, *outer_strides, *inner_strides, *rest) if row_bytes else b""
    return row_stride, row_bytes, packed


class Rows:
    """The rows of one stream in an engine's memory: an array, an array of pages with a slot mapping, or nothing.

    Made by `strided`, `paged` or `skip`, in a few microseconds, and immutable. It keeps its array alive. Whether the
    array's bytes may be read or written while a copy runs is between the engine and the caller.
    """

    __slots__ = ("_address", "_array", "_capacity", "_packed", "_row_bytes", "_slots", "_span", "_tokens_per_row")

    _address: int  # of the array's first element; 0 for a skipped stream
    _array: Array | None
    _slots: _Slots | None
    _capacity: int
    _row_bytes: int
    _tokens_per_row: int
    _packed: bytes
    _span: tuple[int, int] | None  # first byte and end of the destination, once it is known not to overlap itself

    def __init__(self) -> None:
        raise TypeError("use Rows.strided, Rows.paged or Rows.skip")

    @classmethod
    def strided(cls, array: Array, *, axis: int, tokens_per_row: int = 1) -> "Rows":
        """Describe rows that lie along one axis of an array.

        Parameters
        ----------
        array : ndarray
            Any shape of up to 8 axes besides `axis` (after joining those that are one run of memory), any fixed-size
            dtype, any strides. The bytes of index r along `axis`, in C order of the remaining axes, are row r.
        axis : int
            The token axis; negative counts from the end.
        tokens_per_row : int
            Tokens that share a row.

        Raises
        ------
        TypeError
            `array` isn't an ndarray, or holds Python objects.
        ValueError
            `axis` is out of range, rows have no bytes, `tokens_per_row` is below 1, or there are too many axes.
        """
        axis = _checked(array, "array", axis, 1)
        return cls._make(array, axis, 1, array.shape[axis], tokens_per_row, None)

    @classmethod
    def paged(cls, pages: Array, slots: Array, *, axis: int, tokens_per_row: int = 1) -> "Rows":
        """Describe rows that lie in pages, found through a slot mapping.

        Parameters
        ----------
        pages : ndarray
            The page axis is `axis`, the one of the rows in a page is `axis + 1`; otherwise as in `strided`.
        slots : ndarray of int64 or int32, shape (rows,)
            For each row its page times the rows of a page plus its place in the page. Copied, unless it is an int64
            array that owns its memory and isn't writable: that one is used as it is and checked once, however many
            streams share it, and must never change.
        axis : int
            The page axis; negative counts from the end.
        tokens_per_row : int
            Tokens that share a row.

        Raises
        ------
        TypeError
            `pages` or `slots` is of a wrong type.
        ValueError
            As for `strided`, or a slot is out of range.
        """
        axis = _checked(pages, "pages", axis, 2)
        table = _slots_of(slots)
        count = pages.shape[axis] * pages.shape[axis + 1]
        if table.low < 0 or table.high >= count:
            bad = table.low if table.low < 0 else table.high
            raise ValueError(
                f"slot {bad} is out of range: {pages.shape[axis]} pages of {pages.shape[axis + 1]} rows have slots 0 to {count - 1}"
            )
        return cls._make(pages, axis, 2, table.table.size, tokens_per_row, table)

    @classmethod
    def skip(cls, *, row_bytes: int, tokens_per_row: int = 1) -> "Rows":
        """Describe a stream that takes its place in payloads but is neither copied nor checked.

        Parameters
        ----------
        row_bytes : int
            Bytes of a row in the payload, at least 1.
        tokens_per_row : int
            Tokens that share a row.

        Raises
        ------
        ValueError
            A number is below 1.
        """
        if row_bytes < 1 or row_bytes >= 1 << 47:
            raise ValueError(f"row_bytes must be at least 1 and below 2**47, not {row_bytes}")
        self = cls.__new__(cls)
        self._array = self._slots = self._span = None
        self._capacity = self._address = 0
        self._row_bytes = row_bytes
        self._tokens_per_row = _checked_tokens_per_row(tokens_per_row)
        self._packed = _PACK_HEAD(0, 0, 0) + _PACK_REST(
            0, 0, tokens_per_row, row_bytes, row_bytes, 0, 0, *_PADDING[8], *_PADDING[8]
        )
        return self

    @classmethod
    def _make(
        cls,
        array: Array,
        axis: int,
        taken: int,
        capacity: int,
        tokens_per_row: int,
        slots: _Slots | None,
    ) -> "Rows":
        shape = array.shape
        row_stride, row_bytes, rest = _geometry(
            shape, array.strides, array.itemsize, taken == 1 and array.flags.c_contiguous, axis, taken, tokens_per_row
        )
        if not row_bytes:
            raise ValueError(f"rows along axis {axis} of an array of shape {shape} and dtype {array.dtype} are empty")
        self = cls.__new__(cls)
        self._array = array
        self._address = address_of(array)
        self._slots = slots
        self._span = None
        self._capacity = capacity
        self._row_bytes = row_bytes
        self._tokens_per_row = tokens_per_row
        self._packed = _PACK_HEAD(self._address, row_stride, 0 if slots is None else slots.address) + rest
        return self

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._row_bytes

    @property
    def rows(self) -> int:
        """Rows along the token axis, or in the slot mapping; 0 for a skipped stream."""
        return self._capacity

    @property
    def tokens_per_row(self) -> int:
        """Tokens that share a row."""
        return self._tokens_per_row

    @property
    def writable(self) -> bool:
        """May `scatter` write to the array? True for a skipped stream, to which nothing is written."""
        return self._array is None or self._array.flags.writeable

    @property
    def skipped(self) -> bool:
        """Is the stream neither copied nor checked?"""
        return self._array is None

    def __repr__(self) -> str:
        kind = "skip" if self._array is None else "strided" if self._slots is None else "paged"
        return f"<Rows {kind}: {self._capacity} rows of {self._row_bytes} bytes, {self._tokens_per_row} tokens each>"

    def _destination(self) -> tuple[int, int]:
        """Return first byte and end of the array, having made sure that it can be written without writing twice.

        The test is sufficient: it accepts whatever slicing, transposing and splitting of an ordinary array can
        produce, and refuses the rest, such as windows that slide over each other.
        """
        array = self._array
        assert array is not None
        if not array.flags.writeable:
            raise ValueError(f"destination of shape {array.shape} is read-only")
        if self._span is not None:
            return self._span
        low = high = self._address
        if self._slots is None and array.flags.c_contiguous:
            self._span = (low, low + array.nbytes)
            return self._span
        extent = array.itemsize
        for stride, n in sorted((abs(stride), n) for n, stride in zip(array.shape, array.strides, strict=True)):
            if n > 1:
                if stride < extent:
                    raise ValueError(
                        f"destination of shape {array.shape} and strides {array.strides} overlaps itself: a row "
                        "would be written over another"
                    )
                extent += stride * (n - 1)
        for n, stride in zip(array.shape, array.strides, strict=True):
            if stride < 0:
                low += stride * (n - 1)
            else:
                high += stride * (n - 1)
        if self._slots is not None and not self._slots.distinct():
            raise ValueError("slots of a destination must be distinct: a row would be written over another")
        self._span = (low, high + array.itemsize)
        return self._span


def _checked(array: Array, name: str, axis: int, axes: int) -> int:
    """Check what all array-like rows must be; return `axis` counted from the front."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an ndarray, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise TypeError(f"{name} of dtype {array.dtype} holds Python objects, whose bytes mean nothing elsewhere")
    ndim = array.ndim
    place = axis + ndim if axis < 0 else axis
    if not 0 <= place <= ndim - axes:
        last = "the axis after it" if axes == 2 else "it"
        raise ValueError(f"axis {axis} is out of range: {name} has {ndim} axes, and {last} must be among them")
    return place


def _checked_tokens_per_row(tokens_per_row: int) -> int:
    if not 1 <= tokens_per_row < 1 << 31:
        raise ValueError(f"tokens_per_row must be at least 1 and below 2**31, not {tokens_per_row}")
    return tokens_per_row
