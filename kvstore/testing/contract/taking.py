"""Copies of what an engine hands out, as bytes, and comparing them."""

from __future__ import annotations

import numpy as np

from kvstore.arrays import Array
from kvstore.testing.contract.driver import E
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.setting import Setting
from kvstore.testing.contract.wrapping import rows_in
from kvstore.testing.differences import first_rows
from kvstore.tier import Captured

__all__ = ["copy_taken", "must_equal", "part_bytes", "part_span"]


def copy_taken(setting: Setting[E], captured: Captured, start: int, stop: int, position: int) -> dict[str, Array]:
    """Copy what was captured, as bytes: a row a line for streams, one line for a state."""
    layout = setting.layout
    states = {state.name for state in layout.states} if stop == position else set()
    if set(captured.streams) != set(setting.streams) or set(captured.states) != states:
        missing = sorted((set(setting.streams) - set(captured.streams)) | (states - set(captured.states)))
        extra = sorted((set(captured.streams) - set(setting.streams)) | (set(captured.states) - states))
        raise Broken(f"capture({start}, {stop}) of an engine at {position} lacks {missing} and has {extra} too much")
    taken = {
        name: rows_in(stream, captured.streams[name], stream.rows(stop) - stream.rows(start))
        for name, stream in setting.streams.items()
    }
    return taken | {name: part_bytes(setting, name, np.asarray(state), stop) for name, state in captured.states.items()}


def part_bytes(setting: Setting[E], name: str, array: Array, position: int) -> Array:
    """A part's bytes: a stream's rows below `position`, one a line; a state's in one run."""
    stream = setting.streams.get(name)
    if stream is not None:
        return first_rows(stream, array, stream.rows(position))
    flat: Array = np.array(array, order="C").reshape(-1).view(np.uint8)
    return flat


def part_span(setting: Setting[E], name: str, start: int, stop: int) -> slice:
    """Which lines of a part's bytes belong to [start, stop): all of a state's."""
    stream = setting.streams.get(name)
    return slice(None) if stream is None else slice(stream.rows(start), stream.rows(stop))


def must_equal(expected: dict[str, Array], seen: dict[str, Array], what: str) -> None:
    """Refuse parts that differ. Raises Broken, which names them."""
    differing = [name for name, raw in expected.items() if not np.array_equal(raw, seen[name])]
    if differing:
        raise Broken(f"{what}: {', '.join(differing)} differ")
