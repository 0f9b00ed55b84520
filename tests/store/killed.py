"""What the children of test_kills.py do until they are killed: save, restore, promote, hold locks and leases."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

from kvstore import Layout, Namespace, SessionTier, State, Store, Stream
from kvstore.errors import BaseLost, SpacePinned, StoreBusyError, StoreFullError
from kvstore.testing import HashEngine, destination, session_rows, session_states, states_equal
from tests.support import hybrid_layout, plain_layout, wide_layout

__all__ = ["LAYOUTS", "ROLES", "check", "run", "session"]

ROLES = ("saver", "saver", "server", "reader", "holder")
# states that take several transactions beside rows that take one
HEAVY = Layout((Stream("k", "u8", (512,)),), (State("r", "f32", (1280, 1024)),), block_tokens=64, model="heavy")
LAYOUTS = (plain_layout(), hybrid_layout(), wide_layout(), HEAVY)
LONGEST = (150, 120, 700, 150)
_BUDGET = 14 << 20  # of what one child saves, so that without a tight cap nothing is evicted
_PAGE = 32768


def session(number: int, length: int, branch: int = 0) -> list[int]:
    """Tokens of a session; of its branch from the middle, if it is one."""
    tokens = [number, *((n * 7919 + number) % 1000 for n in range(length - 1))]
    return tokens if not branch else [*tokens[: length // 2], 5000 + branch, *tokens[length // 2 + 1 :]]


@functools.lru_cache(64)
def _rows(which: int, tokens: tuple[int, ...]) -> dict[str, Any]:
    return session_rows(LAYOUTS[which], list(tokens))


def check(which: int, namespace: Namespace, tokens: list[int]) -> int:
    """Restore what a lease offers, by copies and by views; every byte has to be the one that was saved. Returns its length."""
    layout = LAYOUTS[which]
    with namespace.lease(tokens) as lease:
        if not lease:
            return 0
        into = destination(layout, lease.length)
        lease.copy_into(into)
        views = {stream.name: [view.tobytes() for view in lease.views(stream.name)] for stream in layout.streams}
        lease.validate()
        right = _rows(which, tuple(tokens[: lease.length]))
        for stream in layout.streams:
            assert into[stream.name].tobytes() == right[stream.name].tobytes(), (which, tokens[0], lease.length, stream.name)
            assert sum(map(len, views[stream.name])) == right[stream.name].nbytes
        if layout.states:
            assert states_equal(lease.states(), session_states(layout, tokens[: lease.length])), (which, tokens[0], lease.length)
        return lease.length


def _open(path: str, cap: int) -> Store:
    while True:
        try:
            return Store.open(path, max_bytes=cap)
        except StoreBusyError:  # somebody is just creating it
            time.sleep(0.001)


def run(path: str, role: str, cap: int, number: int) -> None:
    """Be one of the children. `number` is of this child alone: its sessions begin with it."""
    with _open(path, cap) as store:
        namespaces = [store.namespace(layout) for layout in LAYOUTS]
        {"saver": _save, "server": _serve, "reader": _read, "holder": _hold}[role](store, namespaces, number)


def _cost(which: int, tokens: int) -> int:
    layout = LAYOUTS[which]
    blocks = -(-tokens // layout.block_tokens)
    pages = -(-(layout.payload_bytes(layout.block_tokens) + 8192) // _PAGE)
    return blocks * pages * _PAGE + layout.states_bytes


def _save(store: Store, namespaces: list[Namespace], number: int) -> None:
    """New sessions, longer ones, branches, some of them again; each is told of once it is acknowledged."""
    chance, spent, held = random.Random(number), 0, list[tuple[int, int, int]]()
    for count in range(1 << 30):
        kind = chance.choice(["new", "new", "longer", "longer", "branch", "again", "restore"]) if held else "new"
        which = chance.choice([0, 0, 0, 1, 1, 1, 2, 3, 3])
        one = (which, number * 1000 + count, 3 + int((LONGEST[which] - 3) * chance.random() ** 2))
        branch = 0
        if kind != "new":
            place = chance.randrange(len(held))
            one = held[place]
            if kind == "longer":
                one = (one[0], one[1], min(one[2] + chance.randrange(1, 80), LONGEST[one[0]]))
            branch = count if kind == "branch" else 0
        cost = _cost(one[0], one[2])
        if kind == "restore" or spent + cost > _BUDGET:
            check(one[0], namespaces[one[0]], session(one[1], one[2]))
            continue
        spent += cost
        tokens = session(one[1], one[2], branch)
        layout = LAYOUTS[one[0]]
        states = session_states(layout, tokens) if layout.states else None
        try:
            namespaces[one[0]].save(tokens, _rows(one[0], tuple(tokens)), states=states)
        except (StoreFullError, BaseLost) as error:
            print("refused", type(error).__name__, flush=True)
            continue
        print("saved", *one, branch, flush=True)
        if kind == "new":
            held.append(one)
        elif kind == "longer":
            held[place] = one


def _serve(store: Store, namespaces: list[Namespace], number: int) -> None:
    """A server: promote, read on, cascade; what the engine holds has to be what one holds that was never interrupted."""
    chance, layout = random.Random(number), LAYOUTS[1]
    engine = HashEngine(layout)
    with SessionTier(store, engine, salt=b"served") as tier:
        for count in range(12):
            prompt = session(77 + chance.randrange(2), chance.randrange(2, 120))
            engine.scribble()
            engine.feed(prompt[tier.promote(prompt) :])
            right = HashEngine(layout)
            right.feed(prompt)
            assert engine.state_hash() == right.state_hash(), "wrong bytes"
            tier.cascade(prompt)
            tier.flush()
            print("served", count, flush=True)
    time.sleep(600)


def _read(store: Store, namespaces: list[Namespace], number: int) -> None:
    """Match and restore, by copies, views and mapped buffers, what the others of this round are saving."""
    chance = random.Random(number)
    for count in range(1 << 30):
        which = chance.randrange(len(LAYOUTS))
        tokens = session((number // 10 * 10 + chance.randrange(2)) * 1000 + chance.randrange(8), LONGEST[which])
        found = namespaces[which].match(tokens)
        length = check(which, namespaces[which], tokens)
        with namespaces[which].lease(tokens) as lease:
            if lease:
                lease.map().detach()
        print("read", count, length, found is not None, flush=True)


def _hold(store: Store, namespaces: list[Namespace], number: int) -> None:
    """Hold the write lock in the middle of a transaction, and leases with views, for moments."""
    chance, environment = random.Random(number), store._scope.environment
    while True:
        if chance.random() < 0.5:
            try:
                with environment.write(30.0) as txn:
                    for n in range(chance.randrange(50)):
                        txn.put(txn.db.meta, b"held %d" % n, bytes(chance.randrange(8000)))
                    print("locked", flush=True)
                    time.sleep(chance.uniform(0, 0.05))
                    raise SpacePinned("not meant to be committed")
            except SpacePinned:
                continue
        tokens = session((number // 10 * 10) * 1000 + chance.randrange(4), 60)
        with namespaces[chance.randrange(2)].lease(tokens) as lease:
            views = lease.views("k") if lease else []
            print("leased", len(views), flush=True)
            time.sleep(chance.uniform(0, 0.05))
            del views
