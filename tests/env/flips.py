"""In a child: damage a copy of a store somewhere, and do everything with it that is done with stores."""

from __future__ import annotations

import functools
import os
import random
import shutil
from pathlib import Path
from typing import Any

from kvstore import KVStoreError, Layout, SessionTier, Store
from kvstore.errors import BlockDamaged
from kvstore.testing import HashEngine, destination, session_rows, session_states, states_equal
from tests.support import CAP, data_file, hybrid_layout, plain_layout

from .parts import Parts, parts_of

__all__ = ["damage", "exercise", "make", "try_from"]

LAYOUTS = (plain_layout(), hybrid_layout())
SESSIONS = [[first % 3, *range(10 + 13 * first)] for first in range(6)]
LONG = list(range(5400))  # so many blocks that their reference records need more than one leaf
KEPT = [5, *range(100)]  # what an engine left


def make(path: Path) -> None:
    """Make a store that has every kind of page."""
    with Store.open(path, max_bytes=CAP) as store:
        plain, hybrid = (store.namespace(layout) for layout in LAYOUTS)
        plain.save(LONG, rows(LAYOUTS[0], tuple(LONG)))
        for tokens in SESSIONS:
            for namespace in (plain, hybrid):
                states = session_states(namespace.layout, tokens) if namespace.layout.states else None
                namespace.save(tokens, rows(namespace.layout, tuple(tokens)), states=states)
        engine = HashEngine(LAYOUTS[1])
        engine.feed(KEPT)
        with SessionTier(store, engine, salt=b"engine") as tier:
            tier.cascade(KEPT)
        plain.evict(SESSIONS[5])  # so that there are free pages
        plain.evict(SESSIONS[2])


@functools.cache
def rows(layout: Layout, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Make up the rows of a session, once."""
    return session_rows(layout, list(tokens))


def damage(path: Path, parts: Parts, seed: int, number: int) -> tuple[str, str]:
    """Damage one part of the file after the other, in turn; say which and how."""
    chance = random.Random(f"{seed} {number}")
    data = data_file(path)
    names = sorted(parts.runs)
    part = names[number % len(names)]
    how = ("bit", "bit", "byte", "sector of 512", "sector of 4096")[number // len(names) % 5]
    with data.open("r+b") as file:
        for _ in range(chance.choice([1, 1, 1, 4])):
            offset, length = chance.choice(parts.runs[part])
            # headers and node pointers at a page's start, records at its end
            ends = [chance.randrange(min(64, length)), length - 1 - chance.randrange(min(4096, length)), chance.randrange(length)]
            at = offset + chance.choice(ends)
            old, new = 1, b""
            if how.startswith("sector"):
                old = int(how.split()[-1])
                at, new = at // old * old, bytes(old)
            else:
                file.seek(at)
                byte = file.read(1)[0]
                new = bytes([byte ^ 1 << chance.randrange(8) if how == "bit" else chance.randrange(256)])
            file.seek(at)
            file.write(new)
    return part, how


def _restore(store: Store, layout: Layout, tokens: list[int]) -> int:
    """Restore what is offered, damage being refused block by block until that is whole. Every byte has to be right."""
    namespace = store.namespace(layout)
    for _ in range(400):
        namespace.match(tokens)
        with namespace.lease(tokens) as lease:
            if not lease:
                return 0
            into = destination(layout, lease.length)
            try:
                lease.copy_into(into)
                lease.validate()
                states = lease.states() if layout.states else {}
            except BlockDamaged:
                continue
            right = rows(layout, tuple(tokens[: lease.length]))
            assert all(into[name].tobytes() == right[name].tobytes() for name in into), "wrong bytes"
            assert states_equal(states, session_states(layout, tokens[: lease.length])), "wrong states"
            return lease.length
    raise AssertionError("damage was met again and again: it is not refused")


def _promote(store: Store) -> None:
    """Promote and cascade: nothing may be raised, and what the engine holds is what it would hold without a store."""
    engine, right = HashEngine(LAYOUTS[1]), HashEngine(LAYOUTS[1])
    right.feed([*KEPT, 1])
    with SessionTier(store, engine, salt=b"engine") as tier:
        prompt = [*KEPT, 1]
        engine.feed(prompt[tier.promote(prompt) :])
        assert engine.state_hash() == right.state_hash(), "wrong bytes"
        tier.cascade(prompt)
        tier.flush()


def exercise(path: Path) -> str:
    """Do everything with a store that may be damaged; return how far it got. Named errors are answers."""
    step = "open"
    try:
        with Store.open(path) as store:
            step = "restore"
            for layout in LAYOUTS:
                for tokens in (*SESSIONS, LONG) if layout is LAYOUTS[0] else SESSIONS:
                    _restore(store, layout, tokens)
            step = "verify"
            store.verify(deep=True)
            step = "promote"
            _promote(store)
            step = "save"
            for layout in LAYOUTS:
                namespace, tokens = store.namespace(layout), [2, *range(75), 7, 7, 7]
                states = session_states(layout, tokens) if layout.states else None
                namespace.save(tokens, rows(layout, tuple(tokens)), states=states)
                assert _restore(store, layout, tokens) == len(tokens)
                step = "evict"
                namespace.evict(tokens)
                namespace.evict()
            return "all"
    except KVStoreError as error:
        assert str(error)
        assert type(error) is not KVStoreError, error
        return step


def try_from(whole: Path, work: Path, seed: int, first: int, count: int) -> None:
    """Damage one copy after the other, and print what came of each; before it, its number, so that a death shows which it was."""
    parts = parts_of(data_file(whole))
    for number in range(first, count):
        copy = work / str(number)
        shutil.copytree(whole, copy)
        part, how = damage(copy, parts, seed, number)
        print(f"{number}\t{part}\t{how}", flush=True)
        print(exercise(copy), flush=True)
        shutil.rmtree(copy)
    os._exit(0)  # what is left half open by damage isn't what is tested
