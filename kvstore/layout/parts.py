"""What a session's state consists of: streams, with one row for each token or span of tokens, and states, without."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import ArrayError, LayoutError
from kvstore.layout.dtypes import DType, dtype_of

__all__ = ["MAX_DIMS", "State", "Stream"]

MAX_DIMS = 8
_MAX_EXTENT = 1 << 40


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not name or len(name.encode()) > 200 or any(ord(c) < 0x20 for c in name):
        raise LayoutError(f"a {kind}'s name must be 1 to 200 bytes of printable text, got {name!r}")


def _check_shape(kind: str, name: str, shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    try:
        checked = tuple(operator.index(n) for n in shape)
    except (TypeError, ValueError):
        raise LayoutError(f"{kind} {name!r}: a shape is a tuple of integers, got {shape!r}") from None
    if any(n < 1 for n in checked) or math.prod(checked) > _MAX_EXTENT or len(checked) >= MAX_DIMS:
        raise LayoutError(f"{kind} {name!r}: a shape has at most {MAX_DIMS - 1} axes, each at least 1, got {checked}")
    if dtype.packed and (not checked or checked[-1] % dtype.group):
        raise LayoutError(
            f"{kind} {name!r}: the last axis of dtype {dtype.label} must be a multiple of {dtype.group} elements, got {checked}"
        )
    return checked


def _view_shape(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Turn a shape in elements into the shape of its numpy view: for packed types the last axis counts bytes."""
    return (*shape[:-1], shape[-1] // dtype.group * dtype.group_bytes) if dtype.packed else shape


def _check_dtype(kind: str, name: str, dtype: DType, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
    if not isinstance(array, np.ndarray):
        raise ArrayError(f"{kind} {name!r}: expected a numpy array, got {type(array).__name__}")
    if not dtype.accepts(array.dtype):
        raise ArrayError(f"{kind} {name!r}: expected dtype {dtype.label} as numpy {dtype.view}, got {array.dtype}")


@dataclass(frozen=True, slots=True)
class Stream:
    """An array with one row for each token position, or one for each `tokens_per_row` positions.

    Attributes
    ----------
    name : str
        Unique among the streams and states of a layout. On disk.
    dtype : str
        A label of `kvstore.layout.DTYPES`. On disk.
    row_shape : tuple of int
        The shape of one row, in elements, without the token axis. On disk.
    token_axis : int
        Where the token axis stands in the whole array, 0 to len(row_shape). On disk.
    tokens_per_row : int
        Positions that one row stands for; rows exist for completed spans only. On disk.

    Raises
    ------
    LayoutError
        When these do not fit together.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    token_axis: int = 0
    tokens_per_row: int = 1
    _before: tuple[int, ...] = field(init=False, repr=False, compare=False)  # axes of the view before the token axis
    _behind: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _row_bytes: int = field(init=False, repr=False, compare=False)
    _view_dtype: np.dtype[np.generic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_name("stream", self.name)
        dtype = dtype_of(self.dtype)
        object.__setattr__(self, "row_shape", _check_shape("stream", self.name, self.row_shape, dtype))
        if not isinstance(self.token_axis, int) or not 0 <= self.token_axis <= len(self.row_shape):
            raise LayoutError(
                f"stream {self.name!r}: token_axis must be 0 to {len(self.row_shape)} for rows of shape {self.row_shape}, "
                f"got {self.token_axis!r}"
            )
        if dtype.packed and self.token_axis == len(self.row_shape):
            raise LayoutError(
                f"stream {self.name!r}: dtype {dtype.label} packs {dtype.group} elements along the last axis, "
                "which can't be the token axis; store rows token by token"
            )
        if not isinstance(self.tokens_per_row, int) or not 1 <= self.tokens_per_row <= 65536:
            raise LayoutError(f"stream {self.name!r}: tokens_per_row must be 1 to 65536, got {self.tokens_per_row!r}")
        shape = _view_shape(self.row_shape, dtype)  # these are asked for with each array of each copy
        object.__setattr__(self, "_before", shape[: self.token_axis])
        object.__setattr__(self, "_behind", shape[self.token_axis :])
        object.__setattr__(self, "_view_dtype", dtype.view)
        object.__setattr__(self, "_row_bytes", math.prod(self.row_shape) // dtype.group * dtype.group_bytes)

    @property
    def view_dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype in which the stream's arrays are handed out."""
        return self._view_dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._row_bytes

    def rows(self, tokens: int) -> int:
        """Rows that exist once `tokens` positions are complete."""
        return tokens // self.tokens_per_row

    def array_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the numpy view of the rows of `tokens` positions, token axis included."""
        return (*self._before, tokens // self.tokens_per_row, *self._behind)

    def check_array(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], tokens: int, *, exact: bool = True) -> None:
        """Refuse an array that does not hold the rows of `tokens` positions (or, if not `exact`, at least those).

        Raises
        ------
        ArrayError
            Names the stream, what came and what was expected.
        """
        _check_dtype("stream", self.name, dtype_of(self.dtype), array)
        expected = self.array_shape(tokens)
        if array.shape == expected:
            return
        fits = array.ndim == len(expected) and all(
            got == want if exact or axis != self.token_axis else got >= want
            for axis, (got, want) in enumerate(zip(array.shape, expected, strict=True))
        )
        if not fits:
            least = "" if exact else " or longer along the token axis"
            raise ArrayError(
                f"stream {self.name!r}: expected shape {expected}{least} for {tokens} tokens (token axis {self.token_axis}), "
                f"got {array.shape}"
            )


@dataclass(frozen=True, slots=True)
class State:
    """An array without a token axis, valid at one exact position only.

    Attributes
    ----------
    name : str
        Unique among the streams and states of a layout. On disk.
    dtype : str
        A label of `kvstore.layout.DTYPES`. On disk.
    shape : tuple of int
        The shape in elements; in the axes named by `bounded` it is the most that can come. On disk.
    bounded : tuple of int
        Axes whose extent may be anything from 0 to that of `shape` (a window that isn't full yet; opaque bytes). On disk.

    Raises
    ------
    LayoutError
        When these do not fit together.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bounded: tuple[int, ...] = ()
    _array_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _max_bytes: int = field(init=False, repr=False, compare=False)
    _view_dtype: np.dtype[np.generic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_name("state", self.name)
        object.__setattr__(self, "shape", _check_shape("state", self.name, self.shape, dtype_of(self.dtype)))
        axes = tuple(sorted(self.bounded))
        if len(set(axes)) != len(axes) or any(not isinstance(a, int) or not 0 <= a < len(self.shape) for a in axes):
            raise LayoutError(f"state {self.name!r}: bounded axes must be axes of {self.shape}, got {self.bounded!r}")
        object.__setattr__(self, "bounded", axes)
        dtype = dtype_of(self.dtype)
        shape = _view_shape(self.shape, dtype)  # these are asked for with each state of each restore
        object.__setattr__(self, "_array_shape", shape)
        object.__setattr__(self, "_view_dtype", dtype.view)
        object.__setattr__(self, "_max_bytes", math.prod(shape) * dtype.view.itemsize)

    @classmethod
    def opaque(cls, name: str, max_bytes: int) -> State:
        """Describe bytes that an engine hands out without saying what is in them: dtype u8, bounded length."""
        return cls(name, "u8", (max_bytes,), (0,))

    @property
    def view_dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype in which the state is handed out."""
        return self._view_dtype

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the state's numpy view; in bounded axes the most that can come."""
        return self._array_shape

    @property
    def max_bytes(self) -> int:
        """The most bytes that the state takes."""
        return self._max_bytes

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be this state."""
        limit = self._array_shape
        return len(shape) == len(limit) and all(
            0 <= got <= most if axis in self.bounded else got == most
            for axis, (got, most) in enumerate(zip(shape, limit, strict=True))
        )

    def check_array(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        """Refuse an array that cannot be this state.

        Raises
        ------
        ArrayError
            Names the state, what came and what was expected.
        """
        _check_dtype("state", self.name, dtype_of(self.dtype), array)
        if not self.fits(array.shape):
            free = f", axes {self.bounded} at most that" if self.bounded else ""
            raise ArrayError(f"state {self.name!r}: expected shape {self.array_shape}{free}, got {array.shape}")
