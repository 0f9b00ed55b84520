"""Checks of what is left of a session when it is thrown away, or when a restore fails half-way."""

from __future__ import annotations

from kvstore.errors import KVStoreError
from kvstore.testing.contract.driver import E
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.setting import Look, Setting
from kvstore.testing.contract.wrapping import STATES, CutOff, Wrapped
from kvstore.tier import Restored

__all__ = ["failed_apply", "reset_forgets"]


def reset_forgets(setting: Setting[E]) -> str:
    """Reset an engine that has read something longer, one that was restored, and a fresh one twice, and read anew."""
    length = setting.length
    prefix = setting.tokens[:length]
    with setting.engine(prefix) as live:
        before = setting.look(live, length)
        after = list(setting.go_on(live, length))
    with setting.engine(prefix) as source:
        setting.save(source, prefix)
    with setting.engine(setting.other) as engine:
        for what in ("after something longer", "after a restore"):
            if what == "after a restore":
                setting.promote(engine, setting.tokens[: length + 1], length)
            engine.reset()
            setting.driver.feed(engine, prefix)
            _anew(setting, engine, before, after, what)
    with setting.engine() as engine:
        engine.reset()
        engine.reset()
        setting.driver.feed(engine, prefix)
        _anew(setting, engine, before, after, "twice on an empty one")
    return f"{length} positions read anew, three times"


def _anew(setting: Setting[E], engine: E, before: Look, after: list[Look], what: str) -> None:
    setting.compare(before, setting.look(engine, setting.length), f"an engine that was reset {what} and read anew")
    for expected, seen in zip(after, setting.go_on(engine, setting.length), strict=True):
        setting.compare(expected, seen, f"an engine that was reset {what}, read anew, goes on differently")


def failed_apply(setting: Setting[E]) -> str:
    """Break a restore off at each stream in turn, and at the states; then read anew; in the end restore."""
    length = setting.length
    prefix, prompt = setting.tokens[:length], setting.tokens[: length + 1]
    with setting.engine(prefix) as live:
        setting.save(live, prefix)
        before = setting.look(live, length)
        after = list(setting.go_on(live, length))
    places = [*setting.streams, *([STATES] if setting.layout.states else [])]
    with setting.engine(setting.other) as engine:
        for place in places:
            _cut_off(setting, engine, place)
            setting.driver.feed(engine, prefix)
            setting.compare(before, setting.look(engine, length), f"a restore failed at {place}, and the prompt was read anew")
        setting.promote(engine, prompt, length)
        setting.compare(before, setting.look(engine, length, observe=False), "a restore after one that had failed")
        for expected, seen in zip(after, setting.go_on(engine, length), strict=True):
            setting.compare(expected, seen, "a restore after one that had failed goes on differently")
    return f"cut off at {len(places)} places, each followed by a read of {length} tokens"


def _cut_off(setting: Setting[E], engine: E, place: str) -> None:
    """Promote, and raise from inside of it."""
    handed: list[CutOff] = []

    def cut(restored: Restored) -> Restored:
        handed.append(CutOff(restored, setting.layout, place))
        return handed[-1]

    wrapped = Wrapped(engine, cut)
    with setting.tier(wrapped) as tier:
        try:
            reused = tier.promote(setting.tokens[: setting.length + 1])
        except KVStoreError as error:
            reused = 0
            if not handed or not handed[-1].reached:
                raise Broken(f"the engine takes a restored prefix without asking for {place}: {error}") from error
    if reused or wrapped.raised is None:
        raise Broken(
            f"`copy_into` (or `states`) raised at {place}, and `apply` returned as if it had not: the engine would go on with a "
            "mixture"
        )
