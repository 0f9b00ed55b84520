"""In a child with bad_reads.c in front: every way in which stored bytes are read, over a sector that can't be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore import Layout, Lease, Namespace, SessionTier, State, Store, Stream
from kvstore.errors import BlockDamaged
from kvstore.testing import HashEngine, destination
from tests.support import restored, save

__all__ = ["WAYS", "make", "places", "try_all"]

LAYOUT = Layout(
    (Stream("k", "u8", (4096,)), Stream("v", "u8", (4096,), 1)), (State("r", "f32", (256, 1024)),), block_tokens=32, model="read"
)
TOKENS = list(range(300))
LONGER = [*TOKENS, *range(1000, 1040)]
SALT = b"engine"
LEFT = "what an engine left"


def make(path: Path) -> None:
    """Make a store with a session whose blocks and states take several MiB, and one that an engine left."""
    with Store.open(path, max_bytes=64 << 20) as store:
        save(store.namespace(LAYOUT), TOKENS)
        engine = HashEngine(LAYOUT)
        engine.feed(TOKENS[:100])
        with SessionTier(store, engine, salt=SALT) as tier:
            tier.cascade(TOKENS[:100])


def places(path: Path) -> dict[str, int]:
    """Where the sectors lie that are going to be bad."""
    with Store.open(path) as store:
        with store.namespace(LAYOUT).lease(TOKENS) as lease:
            rows, states = lease.blocks, lease._states
            found = {
                "a header": rows[4].file_offset - 4096,
                "rows": rows[4].file_offset + 40_000,
                "rows of the tail": rows[-1].file_offset + 4096,
                "states": int(states.offset[0]) + 8192,
            }
        with store.namespace(LAYOUT, salt=SALT).lease(TOKENS[:100]) as lease:
            found[LEFT] = lease.blocks[1].file_offset + 8192
    return found


class _ShorterError(Exception):
    """A lease is shorter than what was saved: a block was refused while it was looked for."""


@contextmanager
def _leased(namespace: Namespace) -> Iterator[Lease]:
    with namespace.lease(TOKENS) as lease:
        yield lease
        if lease.length < len(TOKENS):
            raise _ShorterError


def _copy(namespace: Namespace) -> None:
    with _leased(namespace) as lease:
        lease.copy_into(destination(LAYOUT, lease.length))


def _copy_one(namespace: Namespace) -> None:
    with _leased(namespace) as lease:
        lease.copy_into({"v": destination(LAYOUT, lease.length)["v"]})


def _transfer(namespace: Namespace) -> None:
    with _leased(namespace) as lease, lease.start_copy(destination(LAYOUT, lease.length)) as copy:
        copy.wait("v")


def _validate(namespace: Namespace) -> None:
    with _leased(namespace) as lease:
        lease.validate()


def _states(namespace: Namespace) -> None:
    with _leased(namespace) as lease:
        lease.states()


def _map(namespace: Namespace) -> None:
    with _leased(namespace) as lease:
        lease.map()


def _extend(namespace: Namespace) -> None:
    save(namespace, LONGER)


def _check(namespace: Namespace) -> None:
    save(namespace, TOKENS, check=True)


# What reads: given the namespace; a damaged block is the one thing that may be raised.
WAYS: dict[str, Callable[[Namespace], None]] = {
    "copy": _copy,
    "copy of one stream": _copy_one,
    "transfer": _transfer,
    "validate": _validate,
    "states": _states,
    "map": _map,
    "extension": _extend,
    "comparison": _check,
}


def _promote(store: Store) -> None:
    """A promote raises nothing, and the engine holds what it would hold without a store."""
    engine, right = HashEngine(LAYOUT), HashEngine(LAYOUT)
    right.feed(TOKENS[:101])
    with SessionTier(store, engine, salt=SALT) as tier:
        engine.feed(TOKENS[tier.promote(TOKENS[:101]) : 101])
    assert engine.state_hash() == right.state_hash()


def try_all(whole: Path, work: Path, place: str, at: int) -> None:
    """Read in every way over one bad sector, past the page cache and by it; print what was refused, shorter, or read whole."""
    ways: dict[str, Callable[[Namespace], None] | None] = {**WAYS, "deep verify": None}
    by_cache = {name: WAYS[name] for name in ("copy", "validate", "extension")}
    if place == LEFT:
        ways, by_cache = {"promote": None}, {}
    for cached, name, way in [("0", *one) for one in ways.items()] + [("1", *one) for one in by_cache.items()]:
        path = work / "read"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        os.environ["ALL_CACHED"] = cached
        with Store.open(path) as store:
            namespace = store.namespace(LAYOUT)
            os.environ.update(BAD_FROM=str(at), BAD_TO=str(at + 512))
            outcome = "whole"
            try:
                if way is not None:
                    way(namespace)
                elif name == "promote":
                    _promote(store)
                elif not store.verify(deep=True).ok:
                    outcome = "refused"
            except _ShorterError:
                outcome = "shorter"
            except BlockDamaged as error:
                assert error.block_id
                outcome = "refused"
            print(f"{place}, {name}, {'by' if cached == '1' else 'past'} the cache: {outcome}", flush=True)
            if cached == "0":  # the store goes on, with the sector as it is: what is saved again lies elsewhere
                for _ in range(3):
                    with suppress(BlockDamaged):
                        restored(namespace, TOKENS)
                save(namespace, TOKENS)
                assert restored(namespace, TOKENS) == len(TOKENS)
            del os.environ["BAD_FROM"], os.environ["BAD_TO"]
