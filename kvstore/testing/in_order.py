"""Chunks of a restored prefix without anything ahead of who takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kvstore.arrays import StreamArray
from kvstore.leases import Chunk

__all__ = ["chunks_in_order"]


class _Copies(Protocol):
    def copy_into(self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None) -> None: ...


@contextlib.contextmanager
def chunks_in_order(restored: _Copies, chunks: Sequence[Chunk]) -> Iterator[Iterator[Chunk]]:
    """Do what `Restored.chunks` does, by calls of `copy_into`, each when its chunk is asked for.

    For a `Restored` of one's own: one that hands on another's and changes what that copies, or that keeps a session in memory.
    """

    def each() -> Iterator[Chunk]:
        for chunk in chunks:
            restored.copy_into(chunk.buffer.arrays, start=chunk.start, stop=chunk.stop)
            yield chunk

    yield each()
