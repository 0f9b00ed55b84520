"""What a tier would hand to an engine, kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, StreamArray
from kvstore.errors import BlockDamaged
from kvstore.ids import TokenArray, Tokens, as_tokens
from kvstore.leases import Chunk
from kvstore.testing import chunks_in_order
from kvstore.tier.protocol import Engine


def rows(engine: Engine, start: int, stop: int) -> dict[str, Array]:
    """Capture a range from an engine whose streams are plain arrays."""
    streams = engine.capture(start, stop).streams
    assert all(isinstance(array, np.ndarray) for array in streams.values())
    return {name: array for name, array in streams.items() if isinstance(array, np.ndarray)}


class Snapshot:
    """A stored prefix, taken from an engine block by block as cascade does it."""

    def __init__(self, engine: Engine, tokens: Tokens) -> None:
        self._layout, self._tokens = engine.layout(), as_tokens(tokens)
        pieces: list[dict[str, Array]] = []
        for start in range(0, len(tokens), self._layout.block_tokens):
            captured = rows(engine, start, min(start + self._layout.block_tokens, len(tokens)))
            pieces.append({name: array.copy() for name, array in captured.items()})
        self.rows: dict[str, Array] = {
            s.name: np.concatenate([piece[s.name] for piece in pieces], axis=s.token_axis) for s in self._layout.streams
        }
        last = engine.capture((len(tokens) - 1) // self._layout.block_tokens * self._layout.block_tokens, len(tokens))
        self.kept = {name: array.copy() for name, array in last.states.items()}
        self.damaged = False

    @property
    def length(self) -> int:
        """Positions."""
        return len(self._tokens)

    @property
    def tokens(self) -> TokenArray:
        """Their ids."""
        return self._tokens

    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None:
        """Copy everything, or some of it and then raise."""
        stop = self.length if stop is None else stop
        assert start % self._layout.block_tokens == 0
        assert 0 <= start <= stop <= self.length
        for number, stream in enumerate(self._layout.streams):
            if self.damaged and number == len(self._layout.streams) // 2:
                raise BlockDamaged("a byte is wrong")
            target = arrays[stream.name]
            assert isinstance(target, np.ndarray)
            stream.check_array(target, stop - start)
            target[...] = np.take(self.rows[stream.name], range(start, stop), axis=stream.token_axis)

    def chunks(self, chunks: Sequence[Chunk], *, ahead: int = 1) -> AbstractContextManager[Iterator[Chunk]]:
        """Copy each when it is asked for."""
        return chunks_in_order(self, chunks)

    @property
    def states_bytes(self) -> int:
        """Room for the states."""
        return sum(array.nbytes for array in self.kept.values())

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """Copies of the states."""
        return {name: array.copy() for name, array in self.kept.items()}
