"""The sessions that the workloads store: layouts, tokens, arrays of bytes that don't repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.prefixes import random_tokens
from kvstore import Layout, Stream

__all__ = ["TOKEN_BYTES", "arrays_for", "bytes_of", "large_layout", "pieces", "random_tokens", "small_layout", "touched"]

Array = npt.NDArray[Any]
TOKEN_BYTES = 16 << 10
_LAYERS = 8


def large_layout() -> Layout:
    """16 KiB a token: K and V of 8 layers of attention, two heads of 256 in f16 each."""
    streams = [Stream(f"{part}{layer}", "f16", (2, 256)) for layer in range(_LAYERS) for part in "kv"]
    return Layout(streams=tuple(streams), model="bench-16k")


def small_layout() -> Layout:
    """64 bytes a token: where only the index matters."""
    return Layout(streams=(Stream("k", "u8", (32,)), Stream("v", "u8", (32,))), model="bench-64")


def touched(layout: Layout, tokens: int) -> dict[str, Array]:
    """Arrays for every stream, of which every page is in memory."""
    arrays = {s.name: np.empty(s.array_shape(tokens), s.view_dtype) for s in layout.streams}
    for array in arrays.values():
        array.view(np.uint8).fill(1)
    return arrays


def arrays_for(layout: Layout, tokens: int, seed: int = 1) -> dict[str, Array]:
    """Arrays for every stream, filled with random bytes."""
    random = np.random.default_rng(seed)
    arrays = {s.name: np.empty(s.array_shape(tokens), s.view_dtype) for s in layout.streams}
    for array in arrays.values():
        flat = array.reshape(-1).view(np.uint8)
        step = 8 << 20
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            part[:] = np.frombuffer(random.bytes(part.size), np.uint8)
    return arrays


def bytes_of(arrays: dict[str, Array]) -> int:
    """Bytes of all arrays together."""
    return sum(a.nbytes for a in arrays.values())


def pieces(arrays: dict[str, Array], size: int) -> Iterator[list[memoryview]]:
    """Cut contiguous arrays, one after another, into pieces of exactly `size` bytes (the last may be shorter).

    A piece is a list of buffers, since it may reach over the end of an array.
    """
    piece: list[memoryview] = []
    held = 0
    for array in arrays.values():
        flat = array.reshape(-1).view(np.uint8).data
        at = 0
        while at < len(flat):
            part = flat[at : at + size - held]
            piece.append(part)
            held += len(part)
            at += len(part)
            if held == size:
                yield piece
                piece, held = [], 0
    if piece:
        yield piece
