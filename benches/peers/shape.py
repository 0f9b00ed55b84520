"""The sessions of the comparison: tokens and rows that follow from seeds alone, so that every process can make them and check them.

Used by the children too: nothing but the standard library and numpy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Part", "Session", "Shape", "Tokens", "wrong_bytes"]

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]
Part = tuple[int, int]
"""A seed, and the position up to which tokens and rows come from it."""

_SPAN = 64  # positions whose rows are made at once


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's state is made of: K and V of some layers.

    Attributes
    ----------
    layers : int
    row_bytes : int
        Of K, and of V, of one layer at one position.
    """

    layers: int
    row_bytes: int

    @property
    def streams(self) -> int:
        """K of each layer, then V of each layer."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Of all streams at one position."""
        return self.streams * self.row_bytes

    def arrays(self, tokens: int) -> list[Bytes]:
        """Arrays of (tokens, row bytes), one for each stream, as an engine has them; every page is in memory."""
        return [np.ones((tokens, self.row_bytes), np.uint8) for _ in range(self.streams)]


@dataclass(frozen=True, slots=True)
class Session:
    """A session: where its tokens and rows come from. Two that begin with the same part share it.

    Attributes
    ----------
    parts : tuple of (int, int)
        Seeds, each with the position that it reaches to.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, raw: Sequence[Sequence[int]]) -> Session:
        """Read it out of JSON."""
        return cls(tuple((int(seed), int(stop)) for seed, stop in raw))

    @property
    def length(self) -> int:
        """Tokens."""
        return self.parts[-1][1]

    def cut(self, length: int) -> Session:
        """The first `length` tokens."""
        kept: list[Part] = []
        for seed, stop in self.parts:
            kept.append((seed, min(stop, length)))
            if stop >= length:
                break
        return Session(tuple(kept))

    def tokens(self) -> Tokens:
        """The tokens."""
        out = np.empty(self.length, np.uint32)
        start = 0
        for seed, stop in self.parts:
            out[start:stop] = np.random.default_rng([seed]).integers(0, 128_000, stop, dtype=np.uint32)[start:]
            start = stop
        return out

    def spans(self, shape: Shape, stream: int, start: int = 0) -> Iterator[tuple[int, Bytes]]:
        """Rows of a stream from a position on, piece by piece, each with its position."""
        at = start
        while at < self.length:
            seed, until = next(part for part in self.parts if at < part[1])
            span = at // _SPAN
            stop = min(until, (span + 1) * _SPAN)
            raw = np.random.default_rng([seed, stream, span]).bytes(_SPAN * shape.row_bytes)
            rows = np.frombuffer(raw, np.uint8).reshape(_SPAN, shape.row_bytes)
            yield at, rows[at - span * _SPAN : stop - span * _SPAN]
            at = stop

    def fill(self, shape: Shape, arrays: Sequence[Bytes], start: int = 0) -> None:
        """Write the rows from `start` on into arrays that begin at position 0."""
        for stream, array in enumerate(arrays):
            for at, rows in self.spans(shape, stream, start):
                array[at : at + len(rows)] = rows

    def row(self, shape: Shape, stream: int, position: int) -> bytes:
        """One row."""
        _, rows = next(self.spans(shape, stream, position))
        return bytes(rows[0])


def wrong_bytes(shape: Shape, session: Session, arrays: Sequence[Bytes], length: int) -> int:
    """How many bytes of the first `length` positions aren't what the session's rows are."""
    wrong = 0
    for stream, array in enumerate(arrays):
        for at, rows in session.cut(length).spans(shape, stream):
            wrong += int(np.count_nonzero(array[at : at + len(rows)] != rows))
    return wrong


def record(shape: Shape) -> dict[str, Any]:
    """As it goes to a child."""
    return asdict(shape)
