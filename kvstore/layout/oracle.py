"""The oracle: one hash for each stream and state, so that two engines' states can be compared, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from kvstore.errors import ArrayError
from kvstore.layout.layout import Layout

__all__ = ["StateHash", "state_hash"]


@dataclass(frozen=True, slots=True)
class StateHash:
    """Hashes of everything a session consists of at one length. Prints as one line.

    Attributes
    ----------
    length : int
        Token positions covered.
    parts : tuple of (str, str)
        Name and hexadecimal hash (64 bits) of each stream and state, in layout order.
    """

    length: int
    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"length={self.length} " + " ".join(f"{name}={digest}" for name, digest in self.parts)

    def differing(self, other: StateHash) -> tuple[str, ...]:
        """Names of the parts that differ between two hashes, `("length",)` when they are of different lengths."""
        if self.length != other.length:
            return ("length",)
        mine, theirs = dict(self.parts), dict(other.parts)
        return tuple(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))


def state_hash(layout: Layout, arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]], length: int) -> StateHash:
    """Hash every stream's rows below `length` and every state.

    Parameters
    ----------
    layout : Layout
        Which parts there are. All must be in `arrays`: a part left out is what the oracle is for.
    arrays : mapping of str to ndarray
        Streams may be longer than `length` along their token axis; any strides.
    length : int
        Token positions that are valid.

    Raises
    ------
    ArrayError
        When a part is missing, unknown or does not fit the layout.
    """
    known = {s.name for s in layout.streams} | {s.name for s in layout.states}
    if known != set(arrays):
        missing, extra = sorted(known - set(arrays)), sorted(set(arrays) - known)
        raise ArrayError(f"state_hash needs every part of the layout: missing {missing}, unknown {extra}")
    parts: list[tuple[str, str]] = []
    for stream in layout.streams:
        array = arrays[stream.name]
        stream.check_array(array, length, exact=False)
        rows = array[(slice(None),) * stream.token_axis + (slice(0, stream.rows(length)),)]
        parts.append((stream.name, _digest(rows)))
    for state in layout.states:
        state.check_array(arrays[state.name])
        parts.append((state.name, _digest(arrays[state.name])))
    return StateHash(length, tuple(parts))


def _digest(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    head = repr(array.shape).encode()
    # as bytes first: extension types (ml_dtypes' bfloat16) have no buffer format
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return blake3(head).update(raw.data if raw.size else b"").hexdigest(length=8)
