"""A checkpoint's states, packed together: a directory of their actual shapes, then their bytes.

directory  for each state of the layout, in order: one u32 for each axis (the extent in the numpy view)
arrays     each state's bytes in C order, each starting at a multiple of 64 bytes, zeros between
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import IndexDamaged
from kvstore.layout import Layout

__all__ = ["STATE_ALIGN", "max_packed_bytes", "pack_states", "packed_states_bytes", "unpack_states"]

STATE_ALIGN: Final = 64  # on disk


def _align(offset: int) -> int:
    return -(-offset // STATE_ALIGN) * STATE_ALIGN


def _directory_bytes(layout: Layout) -> int:
    return _align(4 * sum(len(s.array_shape) for s in layout.states))


def packed_states_bytes(layout: Layout, states: Mapping[str, npt.NDArray[Any]]) -> int:
    """Length of these states when packed."""
    return _directory_bytes(layout) + sum(_align(states[s.name].nbytes) for s in layout.states)


def max_packed_bytes(layout: Layout) -> int:
    """The longest that a layout's states can be when packed."""
    return _directory_bytes(layout) + sum(_align(s.max_bytes) for s in layout.states)


def pack_states(layout: Layout, states: Mapping[str, npt.NDArray[Any]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the packed states as runs of bytes, in order, without copying arrays that are contiguous.

    The runs point into the caller's arrays where these are contiguous, so they are valid as long as those are.
    """
    extents = [n for s in layout.states for n in states[s.name].shape]
    directory = struct.pack(f"<{len(extents)}I", *extents)
    yield np.frombuffer(directory.ljust(_directory_bytes(layout), b"\0"), np.uint8)
    for state in layout.states:
        array = np.ascontiguousarray(states[state.name])
        if array.nbytes:
            yield array.reshape(-1).view(np.uint8)
        padding = _align(array.nbytes) - array.nbytes
        if padding:
            yield np.zeros(padding, np.uint8)


def unpack_states(layout: Layout, packed: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """Cut packed states into arrays. They are views of `packed`, which must start at an address aligned to 64 bytes.

    Raises
    ------
    IndexDamaged
        When the directory names shapes that the layout does not allow, or lengths that are not those of `packed`.
    """
    at = _directory_bytes(layout)
    if packed.nbytes < at:
        raise IndexDamaged(f"packed states of {packed.nbytes} bytes are shorter than their directory of {at}")
    extents = struct.unpack_from(f"<{sum(len(s.array_shape) for s in layout.states)}I", packed[:at].tobytes())
    arrays: dict[str, npt.NDArray[Any]] = {}
    read = 0
    for state in layout.states:
        most = state.array_shape
        shape = extents[read : read + len(most)]
        read += len(most)
        if shape != most and not state.fits(shape):
            raise IndexDamaged(f"packed states hold shape {shape} for state {state.name!r} of shape {most}")
        dtype = state.view_dtype
        size = state.max_bytes if shape == most else math.prod(shape) * dtype.itemsize
        if at + size > packed.nbytes:
            raise IndexDamaged(f"packed states end inside state {state.name!r}")
        # in one step: a slice, a view of it and a shape for that take twice as long, and a model has a hundred states
        arrays[state.name] = np.ndarray(shape, dtype, packed, at)
        at += _align(size)
    if at != packed.nbytes:
        raise IndexDamaged(f"packed states have {packed.nbytes - at} bytes too many")
    return arrays
