"""The seam between kvstore and an inference engine: what an engine hands out, and what it is handed back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, StreamArray
from kvstore.ids import TokenArray
from kvstore.layout import Layout
from kvstore.leases import Chunk

__all__ = ["Array", "Captured", "Engine", "Restored"]


@dataclass(frozen=True, slots=True)
class Captured:
    """What an engine hands out for the positions [start, stop).

    Attributes
    ----------
    streams : mapping of str to ndarray or Paged
        Every stream of the layout, by name: rows of the positions [start, stop) only, any strides. Owned by the engine
        and valid until its next call; whoever wants to keep it copies it before that.
    states : mapping of str to ndarray
        Every state of the layout if the engine stands at `stop`, else empty. For a layout without states always empty.
    """

    streams: Mapping[str, StreamArray]
    states: Mapping[str, Array] = field(default_factory=dict)


@runtime_checkable
class Restored(Protocol):
    """A stored prefix that an engine is asked to take. Valid during `apply` only."""

    @property
    def length(self) -> int:
        """Positions to restore: the engine's next token goes to position `length`."""

    @property
    def tokens(self) -> TokenArray:
        """The token ids of those positions, uint32[length]."""

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        """Copy the rows of positions [start, stop) of every named stream into the arrays, validating every byte in the same pass.

        A prefix may be taken in several ranges, in any order, through arrays that hold one of them at a time.

        Parameters
        ----------
        arrays : mapping of str to ndarray or Paged
            Each has the stream's shape and view dtype, any strides, and along its token axis at least the rows of the range,
            from index 0 on. In pages, the first slot is that of the row of `start`.
        start : int
            First position, a multiple of the layout's `block_tokens`.
        stop : int, optional
            Position behind the last; `length` by default. A row that stands for several positions is copied if they all lie in
            the range.

        Raises
        ------
        BlockDamaged
            When a byte is wrong; the contents of the arrays are undefined then, and the engine must let the error pass.
        ArrayError
            When an array or the range doesn't fit.
        """

    def chunks(self, chunks: Sequence[Chunk], *, ahead: int = 1) -> AbstractContextManager[Iterator[Chunk]]:
        """Take a prefix through small buffers, chunk by chunk: each is given once it is copied and every byte of it is validated.

        As `copy_into` for each, but the next chunks are copied while the engine reads the one before. Iterate in a `with` block.

        Parameters
        ----------
        chunks : sequence of Chunk
            Each starts where the one before stops, at a multiple of the layout's `block_tokens`.
        ahead : int
            How many chunks may be in place beyond the one that the engine has. A chunk's buffer must not overlap those of the
            `ahead` chunks before it; other chunks may have the same.

        Raises
        ------
        BlockDamaged
            In the iteration: the contents of the chunk's buffer are undefined then, and the engine must let the error pass.
        ArrayError
            When a range or a buffer doesn't fit.
        """

    @property
    def states_bytes(self) -> int:
        """Bytes of a buffer for `states`; 0 for a layout without states."""

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """Copies of all states at position `length`, validated; empty for a layout without states.

        Parameters
        ----------
        into : uint8 array, optional
            A contiguous buffer of at least `states_bytes` bytes that they become views of, for an engine that doesn't want new
            memory each time; it is the engine's, and they are valid until it is used again.

        Raises
        ------
        BlockDamaged
            When a byte is wrong; the engine must let the error pass.
        ArrayError
            When the buffer doesn't fit.
        """


@runtime_checkable
class Engine(Protocol):
    """One sequence of an inference engine. Many engines share one store. Methods are called one at a time.

    The position at which the engine stands is the caller's business: `capture` is asked for positions that the engine has
    computed, and `apply` leaves the engine at `restored.length`.
    """

    def layout(self) -> Layout:
        """What a session's state consists of. The same on every call."""

    def capture(self, start: int, stop: int) -> Captured:
        """Hand out the rows of [start, stop), and the states if the engine stands at `stop`.

        `start` is a block boundary of the layout (0 included). The arrays are valid until the next call.
        """

    def apply(self, restored: Restored) -> None:
        """Take a stored prefix: after it the engine stands at `restored.length` and holds nothing else.

        Whatever it raises is followed by `reset()`: the engine may be in any state when it raises.
        """

    def reset(self) -> None:
        """Forget everything: the engine stands at position 0."""
