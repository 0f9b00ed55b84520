"""Checks that an engine after a restore is the engine that was never interrupted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvstore.ids import TokenArray
from kvstore.testing.contract.driver import E
from kvstore.testing.contract.report import Broken
from kvstore.testing.contract.setting import Look, Setting
from kvstore.testing.contract.taking import copy_taken, must_equal, part_bytes

__all__ = [
    "block_boundaries",
    "dirty_engine",
    "offered_positions",
    "overwritten_at_once",
    "restored_twice",
    "round_trip",
    "shared_prefix",
    "two_at_once",
]


def round_trip(setting: Setting[E]) -> str:
    """Save, restore in a fresh engine, and read on."""
    _through(setting, setting.length)
    return f"{setting.length} positions and {setting.ahead} after them, in a fresh engine and in the one that was captured"


def block_boundaries(setting: Setting[E]) -> str:
    """Do the same with sessions that end around the ends of blocks, each in a namespace of its own."""
    for position in setting.boundaries:
        _through(setting, position)
        setting.forget()
    return f"sessions of {', '.join(map(str, setting.boundaries))} tokens"


def _through(setting: Setting[E], position: int) -> None:
    """Compare with an engine that was never captured: it reads the same tokens in the same batches."""
    prefix = setting.tokens[:position]
    with setting.engine(prefix) as live:
        before = setting.look(live, position)
        after = list(setting.go_on(live, position))
    with setting.engine(prefix) as source:
        setting.save(source, prefix, position)
        setting.compare(before, setting.look(source, position), "after a capture the engine holds something else")
        for expected, seen in zip(after, setting.go_on(source, position), strict=True):
            setting.compare(expected, seen, "after a capture the engine goes on differently")
    with setting.engine() as fresh:
        setting.promote(fresh, setting.tokens[: position + 1], position, position)
        setting.compare(before, setting.look(fresh, position, observe=False), "a fresh engine after a restore")
        for expected, seen in zip(after, setting.go_on(fresh, position), strict=True):
            setting.compare(expected, seen, "a fresh engine goes on from a restore differently")


def offered_positions(setting: Setting[E]) -> str:
    """Ask for prompts of many lengths of one session that was saved twice; all compare with an engine that read up to there."""
    size, length = setting.layout.block_tokens, setting.length
    saved = (size + 1, length)
    prompts = sorted({*setting.boundaries, *(position + 1 for position in setting.boundaries), saved[0] + 1, saved[0] + 2} - {1})
    offered = {
        prompt: prompt - 1 if not setting.layout.states else max((p for p in saved if p < prompt), default=0) for prompt in prompts
    }
    # every engine reads the batches that end at these, so that bytes which follow from the batches are the same in each
    ends = sorted({*saved, *offered.values()} - {0})
    batches = {end: setting.tokens[start:end] for start, end in pairwise((0, *ends))}
    with setting.engine() as source:
        for end, batch in batches.items():
            setting.driver.feed(source, batch)
            if end in saved:
                setting.save(source, setting.tokens[:end])
    live: dict[int, tuple[Look | None, list[Look]]] = {}
    for position in sorted(set(offered.values())):
        with setting.engine(*(batch for end, batch in batches.items() if end <= position)) as engine:
            before = setting.look(engine, position, observe=False) if position else None
            live[position] = before, list(setting.go_on(engine, position))
    with setting.engine(setting.other) as used:
        for prompt, position in offered.items():
            before, after = live[position]
            with setting.engine() as fresh:
                for engine, what in ((used, "a used engine"), (fresh, "a fresh engine")):
                    setting.promote(engine, setting.tokens[:prompt], position)
                    what = f"{what}, restored for a prompt of {prompt} tokens"
                    if before is not None:
                        setting.compare(before, setting.look(engine, position, observe=False), what)
                    for expected, seen in zip(after, setting.go_on(engine, position), strict=True):
                        setting.compare(expected, seen, f"{what}, goes on differently")
    return f"prompts of {len(prompts)} lengths, saved at {saved[0]} and {saved[1]}"


def dirty_engine(setting: Setting[E]) -> str:
    """Restore into an engine that has read something else, longer, and then something shorter into that one."""
    length, short = setting.length, setting.layout.block_tokens + 1
    with setting.engine(setting.tokens[:length]) as source:
        setting.save(source, setting.tokens[:length])
        before, after = setting.look(source, length, observe=False), list(setting.go_on(source, length))
    with setting.engine(setting.tokens[:short]) as source:
        setting.save(source, setting.tokens[:short], "short")
        shorter = setting.look(source, short, observe=False), list(setting.go_on(source, short))
    with setting.engine(setting.other) as dirty:
        for position, case, (at, then) in ((length, "", (before, after)), (short, "short", shorter)):
            setting.promote(dirty, setting.tokens[: position + 1], position, case)
            setting.compare(at, setting.look(dirty, position, observe=False), "an engine that had read something longer before")
            for expected, seen in zip(then, setting.go_on(dirty, position), strict=True):
                setting.compare(expected, seen, "an engine that had read something longer before goes on differently")
    return f"{length} positions over {setting.other.size} others, then {short} over those"


def restored_twice(setting: Setting[E]) -> str:
    """Restore, read on, save that, and restore it in a fresh engine: a session that was itself resumed."""
    first, length = setting.layout.block_tokens + 1, setting.length
    head, rest = setting.tokens[:first], setting.tokens[first:length]
    with setting.engine(head, rest) as live:
        before, after = setting.look(live, length, observe=False), list(setting.go_on(live, length))
    with setting.engine(head) as source:
        setting.save(source, head)
    with setting.engine() as resumed:
        setting.promote(resumed, setting.tokens[: first + 1], first)
        setting.driver.feed(resumed, rest)
        held = {name: part_bytes(setting, name, before.parts[name], length) for name in before.parts}
        taken = copy_taken(setting, resumed.capture(0, length), 0, length, length)
        must_equal(held, taken, "captured of a session that was resumed, against one that wasn't")
        setting.save(resumed, setting.tokens[:length])
    with setting.engine() as fresh:
        setting.promote(fresh, setting.tokens[: length + 1], length)
        setting.compare(before, setting.look(fresh, length, observe=False), "a session that was resumed, saved and restored")
        for expected, seen in zip(after, setting.go_on(fresh, length), strict=True):
            setting.compare(expected, seen, "a session that was resumed, saved and restored goes on differently")
    return f"restored at {first}, saved at {length}, restored there"


def overwritten_at_once(setting: Setting[E]) -> str:
    """Let the next request overwrite the engine right after a cascade, before its bytes are written."""
    length = setting.length
    with setting.engine(setting.tokens[:length]) as live:
        before, after = setting.look(live, length, observe=False), list(setting.go_on(live, length))
    with setting.engine(setting.tokens[:length]) as source, setting.tier(source) as tier:
        missed = tier.cascade(setting.tokens[:length]).missed
        source.reset()
        setting.driver.feed(source, setting.other)
        tier.flush()
        if missed or tier.stats.save_misses:
            raise Broken(f"a cascade of {length} tokens was not stored: {missed or tier.stats}")
        setting.promote(source, setting.tokens[: length + 1], length)
        setting.compare(before, setting.look(source, length, observe=False), "what was saved before the engine was overwritten")
        for expected, seen in zip(after, setting.go_on(source, length), strict=True):
            setting.compare(expected, seen, "what was saved before the engine was overwritten goes on differently")
    return f"{length} positions, overwritten by {setting.other.size} others before the flush"


def shared_prefix(setting: Setting[E]) -> str:
    """Save two sessions that part in the middle of a block, and restore both, and what they share."""
    size, length = setting.layout.block_tokens, setting.length
    parting = size + size // 2
    shared = setting.tokens[:parting]
    ends = {"first": setting.tokens[parting:length], "second": setting.other[parting:length]}
    looks = {}
    for name, end in ends.items():
        with setting.engine(shared) as source:
            setting.save(source, shared)
            looks["shared"] = setting.look(source, parting, observe=False)
            setting.driver.feed(source, end)
            looks[name] = setting.look(source, length, observe=False)
            setting.save(source, _joined(shared, end))
    with setting.engine() as engine:
        for name, end in ends.items():
            # what would come next, so that something is left to compute
            prompt = _joined(shared, end, setting.tokens[length : length + 1])
            setting.promote(engine, prompt, length)
            setting.compare(looks[name], setting.look(engine, length, observe=False), f"the {name} of two that part at {parting}")
        next_ones = {int(setting.tokens[parting]), int(setting.other[parting])}
        apart = [token for token in setting.driver.tokens(length, 2 * setting.seed + 2).tolist() if token not in next_ones]
        prompt = _joined(shared, np.array(apart[:1], np.uint32))
        setting.promote(engine, prompt, parting)
        setting.compare(looks["shared"], setting.look(engine, parting, observe=False), f"what two share that part at {parting}")
    return f"two sessions of {length} tokens that part at {parting}"


def two_at_once(setting: Setting[E]) -> str:
    """Let two engines read two sessions in turns, save them in turns, and each take up the other's."""
    length, half = setting.length, setting.layout.block_tokens + 1
    sessions = setting.tokens[:length], setting.other[:length]
    looks = []
    for session in sessions:
        with setting.engine(session[:half], session[half:]) as alone:
            looks.append(setting.look(alone, length))
    with setting.engine() as one, setting.engine() as two:
        for part in (slice(half), slice(half, None)):
            for engine, session in zip((one, two), sessions, strict=True):
                setting.driver.feed(engine, session[part])
        for engine, session, expected in zip((one, two), sessions, looks, strict=True):
            setting.compare(expected, setting.look(engine, length), "an engine while another one reads something else")
            setting.save(engine, session)
        for engine, session in zip((two, one), sessions, strict=True):
            setting.promote(engine, _joined(session, setting.tokens[-1:]), length)
        for engine, expected in zip((two, one), looks, strict=True):
            seen = setting.look(engine, length, observe=False)
            setting.compare(expected, seen, "an engine that has taken up what another one read")
    return f"two sessions of {length} tokens in turns, then exchanged"


def _joined(*runs: TokenArray) -> TokenArray:
    joined: TokenArray = np.concatenate(runs)
    return joined
