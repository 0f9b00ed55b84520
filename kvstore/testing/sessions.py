"""Sessions made up from their tokens: rows and states whose bytes follow from the prefix alone, and from who computed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvstore.ids import Tokens, as_tokens
from kvstore.layout import Layout, State

__all__ = ["destination", "session_rows", "session_states", "state_shape", "states_equal"]

Array: TypeAlias = npt.NDArray[Any]


def session_rows(layout: Layout, tokens: Tokens, *, writer: int = 0, start: int = 0) -> dict[str, Array]:
    """Make up the rows of every stream for the positions [start, len(tokens)).

    Parameters
    ----------
    layout : Layout
        Which streams.
    tokens : sequence of int, or integer array
        The whole prefix. A row depends on all tokens up to the end of its span and on nothing behind.
    writer : int
        Who computed them: rows of two writers differ, as those of two runs of an engine may.
    start : int
        A multiple of every `tokens_per_row`.

    Returns
    -------
    dict of str to ndarray
        C-contiguous, each of `stream.array_shape(len(tokens) - start)`.
    """
    prompt = as_tokens(tokens)
    hashers = [blake3(f"{index} {stream.name} {writer}".encode()) for index, stream in enumerate(layout.streams)]
    runs: list[list[bytes]] = [[] for _ in layout.streams]
    for position in range(prompt.size):
        token = prompt[position].tobytes()
        for stream, hasher, run in zip(layout.streams, hashers, runs, strict=True):
            hasher.update(token)
            if position >= start and (position + 1) % stream.tokens_per_row == 0:
                run.append(hasher.digest(length=stream.row_bytes))
    arrays: dict[str, Array] = {}
    for stream, run in zip(layout.streams, runs, strict=True):
        array = np.zeros(stream.array_shape(prompt.size - start), stream.view_dtype)
        rows = np.moveaxis(array, stream.token_axis, 0)
        for index, raw in enumerate(run):
            rows[index] = np.frombuffer(raw, stream.view_dtype).reshape(rows.shape[1:])
        arrays[stream.name] = array
    return arrays


def state_shape(state: State, position: int) -> tuple[int, ...]:
    """The shape that a made-up state has at a position: bounded axes take every extent they may, 0 and the most included."""
    return tuple(
        (position * 7 + axis) % (extent + 1) if axis in state.bounded else extent for axis, extent in enumerate(state.array_shape)
    )


def session_states(layout: Layout, tokens: Tokens, *, writer: int = 0) -> dict[str, Array]:
    """Make up every state of a layout at position len(tokens). Parameters as for `session_rows`."""
    prompt = as_tokens(tokens)
    states: dict[str, Array] = {}
    for index, state in enumerate(layout.states):
        shape = state_shape(state, prompt.size)
        size = int(np.prod(shape)) * state.view_dtype.itemsize
        hasher = blake3(f"{index} {state.name} {writer}".encode()).update(prompt.tobytes())
        states[state.name] = np.frombuffer(hasher.digest(length=size) if size else b"", state.view_dtype).reshape(shape).copy()
    return states


def destination(layout: Layout, tokens: int, *, spare: int = 0, fill: int = 0xA5) -> dict[str, Array]:
    """Arrays to restore `tokens` positions into, with room for `spare` more, every byte set to `fill`."""
    arrays: dict[str, Array] = {}
    for stream in layout.streams:
        array = np.empty(stream.array_shape(tokens + spare), stream.view_dtype)
        array.reshape(-1).view(np.uint8)[:] = fill
        arrays[stream.name] = array
    return arrays


def states_equal(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Whether two sets of states have the same names, shapes, dtypes and bytes."""
    return set(a) == set(b) and all(
        a[name].shape == b[name].shape and a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a
    )
