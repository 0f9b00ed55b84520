"""Checks of what an engine hands out, and of the layout that it says it has."""

from __future__ import annotations

import numpy as np

from kvstore.arrays import Array
from kvstore.testing.contract.driver import E
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.setting import Setting
from kvstore.testing.contract.taking import copy_taken, must_equal, part_bytes, part_span

__all__ = ["capture_in_pieces", "capture_twice", "deterministic", "same_layout"]


def same_layout(setting: Setting[E]) -> str:
    """Ask two engines for their layout, before and after they have read something."""
    with setting.engine() as fresh, setting.engine(setting.other[: setting.length]) as used:
        for layout in (fresh.layout(), used.layout()):
            if layout.fingerprint != setting.layout.fingerprint:
                raise Broken(
                    f"two engines have two layouts: what one stores the other never finds. One is\n"
                    f"{setting.layout.canonical.decode()}\nthe other\n{layout.canonical.decode()}"
                )
    return f"fingerprint {setting.layout.fingerprint.hex()[:16]} in three engines"


def deterministic(setting: Setting[E]) -> str:
    """Let two engines read the same tokens in the same batches, and a third one others."""
    length = setting.length
    looks = []
    for tokens in (setting.tokens, setting.tokens, setting.other):
        with setting.engine(tokens[:length]) as engine:
            looks.append(setting.look(engine, length))
    setting.compare(looks[0], looks[1], "two engines that read the same in the same batches")
    if looks[0].observed == looks[2].observed or looks[0].hash == looks[2].hash:
        raise Broken("an engine that read other tokens holds the same or says the same next: nothing could be told apart")
    return f"two engines of {length} positions are equal, hash {looks[0].hash.parts[0][1]}…; a third one's is another"


def capture_in_pieces(setting: Setting[E]) -> str:
    """Capture a session at once and block by block; then the rows of a prefix only, while the engine stands behind it."""
    length, size = setting.length, setting.layout.block_tokens
    with setting.engine(setting.tokens[:length]) as engine:
        held = setting.look(engine, length, observe=False).parts
        whole = copy_taken(setting, engine.capture(0, length), 0, length, length)
        must_equal(
            whole, {name: part_bytes(setting, name, held[name], length) for name in held}, "captured at once, against what it holds"
        )
        pieces: dict[str, list[Array]] = {name: [] for name in whole}
        for start in range(0, length, size):
            stop = min(start + size, length)
            taken = copy_taken(setting, engine.capture(start, stop), start, stop, length)
            for name, raw in taken.items():
                pieces[name].append(raw)
        must_equal(whole, {name: np.concatenate(raw) for name, raw in pieces.items()}, "captured in pieces, against all at once")
        for start, stop in ((0, size + 1), (size, 2 * size), (size, length)):
            taken = copy_taken(setting, engine.capture(start, stop), start, stop, length)
            expected = {name: raw[part_span(setting, name, start, stop)] for name, raw in whole.items() if name in taken}
            must_equal(expected, taken, f"captured [{start}, {stop}), against a part of all at once")
    return f"{length} positions in {-(-length // size)} pieces"


def capture_twice(setting: Setting[E]) -> str:
    """Capture twice; cascade twice; nothing is added by the second, and nothing differs."""
    length = setting.length
    with setting.engine(setting.tokens[:length]) as engine:
        first = copy_taken(setting, engine.capture(0, length), 0, length, length)
        must_equal(
            first, copy_taken(setting, engine.capture(0, length), 0, length, length), "the second capture, against the first"
        )
        before = setting.look(engine, length)
        setting.save(engine, setting.tokens[:length])
        stored = setting.store.stats()
        with setting.tier(engine) as tier:
            result = tier.cascade(setting.tokens[:length])
        if (result.stored_tokens, result.captured_tokens) != (length, 0) or setting.store.stats().blocks != stored.blocks:
            raise Broken(f"a second cascade of the same session stored something anew: {result}")
        setting.compare(before, setting.look(engine, length), "after two cascades the engine holds something else")
    return f"{length} positions; {stored.blocks} blocks after one cascade and after two"
