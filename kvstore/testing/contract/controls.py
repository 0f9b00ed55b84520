"""The negative controls: a part that is left out, stale or of another place has to change what the engine does next.

An engine that never reads what it restored of a part passes every check of equality, until the part matters. So each part's
bytes are spoiled in turn, behind the store's back, and the engine must notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.arrays import Array
from kvstore.errors import KVStoreError
from kvstore.layout import State, Stream
from kvstore.testing.contract.driver import E
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.setting import Look, Setting
from kvstore.testing.contract.wrapping import Spoiled, Wrapped
from kvstore.testing.differences import differences, first_rows

__all__ = ["negative_controls"]


@dataclass(frozen=True, slots=True)
class _Control:
    """What stands in a part's place. Of the controls of a `group` one has to be noticed."""

    label: str
    instead: Array
    group: str


def negative_controls(setting: Setting[E]) -> str:
    """Restore with one part's bytes replaced, for every stream and state, in each of several ways."""
    length = setting.length
    prefix = setting.tokens[:length]
    with setting.engine(prefix) as source:
        right = setting.look(source, length, observe=False)
        setting.save(source, prefix)
    with setting.engine(setting.other[:length]) as source:
        stale = setting.look(source, length, observe=False)
    with setting.engine(setting.tokens[: length - 1]) as source:
        earlier = setting.look(source, length - 1, observe=False)
    parts: list[Stream | State] = [*setting.layout.streams, *setting.layout.states]
    unnoticed: list[str] = []
    tried = 0
    with setting.engine() as engine:
        setting.promote(engine, setting.tokens[: length + 1], length)
        clean = list(setting.go_on(engine, length))
        for part in parts:
            as_stored = _Control("the bytes that are stored", _good(part, right), "stored")
            if _noticed(setting, engine, part, as_stored, clean):
                raise Broken(
                    f"with {as_stored.label} in the place of {part.name}, that is after a restore like any other, what follows is "
                    "something else: no control says anything until this holds"
                )
            controls = list(_controls(part, right, stale, earlier))
            if not as_stored.instead.size:
                unnoticed.append(
                    f"omission of {part.name} would go unnoticed: it has no bytes at {length} positions. Give a length at which "
                    "it has"
                )
            groups: dict[str, list[_Control]] = {}
            for control in controls:
                groups.setdefault(control.group, []).append(control)
            tried += len(groups)
            failed = [group for group in groups.values() if not any(_noticed(setting, engine, part, c, clean) for c in group)]
            if failed:
                ways = ", ".join(" or ".join(control.label for control in group) for group in failed)
                unnoticed.append(f"omission of {part.name} would go unnoticed: in its place {ways} changed nothing that follows")
    if unnoticed:
        raise Broken("; ".join(unnoticed))
    return f"{len(parts)} parts, {tried} controls, at position {length}"


def _controls(part: Stream | State, right: Look, stale: Look, earlier: Look) -> Iterator[_Control]:
    """Ways to spoil a part, without those that change none of its bytes; if none of its shape is left, all its bits inverted."""
    candidates = _of_stream(part, right, stale) if isinstance(part, Stream) else _of_state(part, right, stale, earlier)
    good = _good(part, right)
    found = [c for c in candidates if c.instead.shape != good.shape or c.instead.tobytes() != good.tobytes()]
    if good.size and all(c.instead.shape != good.shape for c in found):  # a shape can be noticed by who never reads the bytes
        inverted = np.frombuffer(bytes(255 - byte for byte in good.tobytes()), good.dtype).reshape(good.shape)
        found.append(_Control("all its bits inverted", inverted, "inverted"))
    yield from found


def _good(part: Stream | State, right: Look) -> Array:
    """What is stored of a part, as `Spoiled` takes it."""
    held = right.parts[part.name]
    return first_rows(part, held, part.rows(right.position)) if isinstance(part, Stream) else held


def _of_stream(stream: Stream, right: Look, stale: Look) -> Iterator[_Control]:
    rows = stream.rows(right.position)
    good, other = (first_rows(stream, look.parts[stream.name], rows) for look in (right, stale))
    yield _Control("zeros", np.zeros_like(good), "zeros")
    yield _Control("the rows of another session", other, "session")
    yield _Control("each row that of the position before", np.roll(good, 1, axis=0), "position")
    for label, row in (("zeros", 0 * good[-1:]), ("that of another session", other[-1:]), ("that of the first position", good[:1])):
        yield _Control(f"its last row {label}", np.concatenate([good[:-1], row]), "last row")


def _of_state(state: State, right: Look, stale: Look, earlier: Look) -> Iterator[_Control]:
    name = state.name
    yield _Control("zeros", np.zeros_like(right.parts[name]), "zeros")
    yield _Control("that of another session", stale.parts[name], "session")
    yield _Control("that of the position before", earlier.parts[name], "position")


def _noticed(setting: Setting[E], engine: E, part: Stream | State, control: _Control, clean: list[Look]) -> bool:
    """Whether the engine refuses what it is given, or goes on differently."""
    length = setting.length
    spoiled = part if isinstance(part, Stream) else part.name
    wrapped = Wrapped(engine, lambda restored: Spoiled(restored, spoiled, control.instead))
    with setting.tier(wrapped) as tier:
        try:
            reused = tier.promote(setting.tokens[: length + 1])
        except KVStoreError:
            if wrapped.raised is None:
                raise
    if wrapped.raised is not None:
        return True
    if reused != length:
        raise Broken(f"a promote of {length + 1} tokens reused {reused}, expected {length}")
    for batch, expected in zip(setting.batches_after(length), clean, strict=True):
        try:
            setting.driver.feed(engine, batch)
            if setting.driver.observe(engine) != expected.observed:
                return True
            seen = setting.look(engine, expected.position, observe=False)
        except Exception:  # an engine that can't go on has noticed
            return True
        found = differences(setting.layout, expected.parts, seen.parts, seen.position, start=length)
        # a state that lies unread in the engine differs as well: what follows from it is anything else
        if {difference.part for difference in found} - ({part.name} if isinstance(part, State) else set()):
            return True
    return False
