"""Faults: those of the environment are counted misses, misuse raises, and the engine is never left with a mixture."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Captured, KVStoreError, SessionTier, Store
from kvstore.errors import ArrayError, BlockDamaged, EngineError, StoreClosedError, TokensError
from kvstore.testing import HashEngine
from tests.support import CAP, child_at, data_file, flip, stop

from .engines import HYBRID, LAYOUTS, PLAIN, BadCapture, FailingApply, Forgetful, Piecewise, Swallower, uninterrupted

TOKENS = list(range(100))


@pytest.fixture
def filled(store: Store) -> Store:
    """Store sessions of every layout."""
    for layout in LAYOUTS.values():
        with SessionTier(store, uninterrupted(layout, TOKENS[:60])) as tier:
            tier.cascade(TOKENS[:60])
        with SessionTier(store, uninterrupted(layout, TOKENS)) as tier:
            tier.cascade(TOKENS)
            assert tier.stats.faults == 0
    return store


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize(
    "error", [RuntimeError("no memory on the device"), ValueError("x"), KeyError("x"), MemoryError(), OSError(5, "x")], ids=repr
)
def test_an_apply_that_fails_half_way(filled: Store, name: str, error: Exception) -> None:
    """Whatever an engine raises while it takes a prefix, it is reset, the promote is a counted miss, and the answer is right."""
    engine = FailingApply(LAYOUTS[name], error)
    with SessionTier(filled, engine) as tier:
        assert tier.promote([*TOKENS, 1]) == 0
        assert engine.position == 0
        assert engine.resets >= 1
        assert tier.stats.faults == 1
        engine.feed([*TOKENS, 1])
        assert engine.state_hash() == uninterrupted(LAYOUTS[name], [*TOKENS, 1]).state_hash()
        assert tier.promote([*TOKENS, 1]) == 100  # the store is whole


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_an_interrupt_passes(filled: Store, error: BaseException) -> None:
    """An interrupt inside `apply` is the caller's, not a miss; afterwards a promote works as ever."""
    engine = FailingApply(PLAIN, error)
    with SessionTier(filled, engine) as tier:
        with pytest.raises(type(error)):
            tier.promote([*TOKENS, 1])
        assert tier.promote([*TOKENS, 1]) == 100
        engine.feed([1])
        assert engine.state_hash() == uninterrupted(PLAIN, [*TOKENS, 1]).state_hash()


@pytest.mark.parametrize(
    ("name", "forgets"), [("plain", "vt"), ("plain", "pool"), ("hybrid", "k"), ("hybrid", "states"), ("recurrent", "states")]
)
def test_an_engine_that_forgets_a_part(filled: Store, name: str, forgets: str) -> None:
    """An engine that takes a prefix without a stream or the states is an EngineError that names it, and has been reset."""
    engine = Forgetful(LAYOUTS[name], forgets)
    with SessionTier(filled, engine) as tier:
        with pytest.raises(EngineError, match=forgets) as caught:
            tier.promote([*TOKENS, 1])
        assert isinstance(caught.value, RuntimeError)
        assert engine.position == 0


_WHOLE = [(0, 48), (48, 64), (64, 100)]


@pytest.mark.parametrize("name", ["plain", "hybrid"])
@pytest.mark.parametrize("ranges", [_WHOLE, _WHOLE[::-1], [(48, 100), (0, 16), (16, 64)], [(0, 96), (96, 100), (0, 0)]], ids=str)
def test_an_engine_that_takes_ranges(filled: Store, name: str, ranges: list[tuple[int, int]]) -> None:
    """An engine may take a prefix range by range, in any order and overlapping: it then stands where it would have stood."""
    engine = Piecewise(LAYOUTS[name], ranges)
    with SessionTier(filled, engine) as tier:
        assert tier.promote([*TOKENS, 1]) == 100
    assert engine.state_hash() == uninterrupted(LAYOUTS[name], TOKENS).state_hash()


@pytest.mark.parametrize(
    ("ranges", "left"),
    [
        ([(0, 48), (64, 100)], r"48, 64"),
        ([(16, 100)], r"0, 16"),
        ([(0, 96)], r"96, 100"),
        ([(48, 100), (0, 47)], r"47, 48"),
        ([(0, 100), (0, 16)], ""),
        ([(0, 0)], "'v'"),
    ],
)
def test_an_engine_that_leaves_a_gap(filled: Store, ranges: list[tuple[int, int]], left: str) -> None:
    """An engine that leaves out positions of one stream is an EngineError that says which, and has been reset."""
    engine = Piecewise(LAYOUTS["hybrid"], ranges, ["v"])
    with SessionTier(filled, engine) as tier:
        if not left:
            assert tier.promote([*TOKENS, 1]) == 100
            return
        with pytest.raises(EngineError, match=left):
            tier.promote([*TOKENS, 1])
        assert engine.position == 0


def test_a_gap_is_one_of_rows(filled: Store) -> None:
    """Positions that are part of no row of a stream needn't be taken of it; those that are must be."""
    with SessionTier(filled, Piecewise(PLAIN, [(0, 16), (16, 97)], ["pool"])) as tier:
        assert tier.promote([*TOKENS[:99], 1]) == 99
        assert tier.promote([*TOKENS[:98], 1]) == 98
    engine = Piecewise(PLAIN, [(0, 95)], ["pool"])
    with SessionTier(filled, engine) as tier, pytest.raises(EngineError, match=r"pool \[92, 96\)"):
        tier.promote([*TOKENS[:99], 1])


def _part_offset(store: Store, name: str, position: int) -> int:
    """File offset of a byte that a promote to this position reads: of its fifth block, or of the states without streams."""
    namespace = store.namespace(LAYOUTS[name])
    with namespace.lease(TOKENS[:position]) as lease:
        assert lease.length == position
        if lease.blocks and LAYOUTS[name].streams:
            return lease.blocks[4].file_offset + 5
    from kvstore.blocks import find
    from tests.store.index import nodes_on

    [checkpoint] = [c for n in nodes_on(namespace, TOKENS) for c in n.checkpoints if c.position == position]
    with namespace.scope.store.environment.reading() as txn:
        ref = find(txn, checkpoint.ids[0])
    assert ref is not None
    return ref.offset + 5


@pytest.mark.parametrize(("name", "fallback"), [("plain", 64), ("hybrid", 60), ("recurrent", 60)])
def test_damage_falls_back_and_heals(filled: Store, name: str, fallback: int, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged bytes are refused, the engine gets the shorter valid prefix, the answer is right, and the next cascade heals."""
    layout = LAYOUTS[name]
    flip(data_file(filled.path), _part_offset(filled, name, 100))
    engine = uninterrupted(layout, [3] * 150)  # dirty
    with SessionTier(filled, engine) as tier:
        with caplog.at_level(logging.WARNING, "kvstore"):
            assert tier.promote([*TOKENS, 1]) == fallback
        assert "damaged" in caplog.text
        assert (tier.stats.fallbacks, tier.stats.faults) == (1, 0)
        assert engine.state_hash() == uninterrupted(layout, TOKENS[:fallback]).state_hash()
        engine.feed([*TOKENS[fallback:], 1])
        assert engine.state_hash() == uninterrupted(layout, [*TOKENS, 1]).state_hash()
    whole = uninterrupted(layout, TOKENS)
    with SessionTier(filled, whole) as tier:
        tier.cascade(TOKENS)
        tier.flush()
        assert tier.stats.saved == 1
    after = HashEngine(layout)
    with SessionTier(filled, after) as tier:
        assert tier.promote([*TOKENS, 1]) == 100
        assert after.state_hash() == uninterrupted(layout, TOKENS).state_hash()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_an_engine_that_swallows_damage(filled: Store, name: str) -> None:
    """An engine that hides the error of damaged bytes, in rows or in states, is an EngineError, and has been reset."""
    layout = LAYOUTS[name]
    flip(data_file(filled.path), _part_offset(filled, name, 100))
    engine = Swallower(layout)
    with SessionTier(filled, engine) as tier:
        with pytest.raises(EngineError):
            tier.promote([*TOKENS, 1])
        assert engine.position == 0
        assert tier.promote([*TOKENS, 1]) < 100
    filled.namespace(layout).evict()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_damage_everywhere_is_a_clean_start(filled: Store, name: str) -> None:
    """When no block of a session is whole, the engine starts clean."""
    layout = LAYOUTS[name]
    namespace = filled.namespace(layout)
    with filled.namespace(layout).lease(TOKENS) as lease:
        places = [block.file_offset for block in lease.blocks]
    places += [_part_offset(filled, name, position) for position in (60, 100)] if name == "recurrent" else []
    for place in places:
        flip(data_file(filled.path), place)
    engine = uninterrupted(layout, [3] * 150)
    with SessionTier(filled, engine) as tier:
        assert tier.promote([*TOKENS, 1]) == 0
        assert engine.position == 0
        engine.feed([*TOKENS, 1])
        tier.cascade([*TOKENS, 1])
        tier.flush()
        assert tier.stats.saved == 1
        assert engine.state_hash() == uninterrupted(layout, [*TOKENS, 1]).state_hash()
    with SessionTier(filled, HashEngine(layout)) as tier:
        assert tier.promote([*TOKENS, 1, 2]) == 101
    namespace.evict()


HOLDER = """
store = Store.open(path)
with store._scope.environment.write(5.0):
    print("holding", flush=True)
    time.sleep(600)
"""


def test_a_lock_held_by_a_stopped_process_is_a_miss(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While a stopped process holds the write lock, a promote works, a cascade is a counted miss, and nothing raises."""
    with Store.open(path, max_bytes=CAP, lock_timeout=0.2) as store:
        with SessionTier(store, uninterrupted(PLAIN, TOKENS)) as tier:
            tier.cascade(TOKENS)
        engine = HashEngine(PLAIN)
        with SessionTier(store, engine) as tier, child_at(HOLDER, path) as holder:
            stop(holder)
            assert tier.promote([*TOKENS, 1]) == 100
            engine.feed([1])
            with caplog.at_level(logging.WARNING, "kvstore"):
                tier.cascade([*TOKENS, 1])
                assert tier.flush(30)
            assert "WriteLockTimeout" in caplog.text
            stats = tier.stats
            assert (stats.save_misses, stats.faults, stats.saved) == (1, 1, 0)
            holder.kill()
            holder.wait()
            tier.cascade([*TOKENS, 1])
            tier.flush()
            assert tier.stats.saved == 1
            assert tier.promote([*TOKENS, 1, 2]) == 101


def test_a_full_store_is_a_miss(path: Path) -> None:
    """A session too large for the store is a counted miss; what was saved of it is a valid prefix, and the engine goes on."""
    from kvstore import Layout, Stream

    layout = Layout((Stream("k", "u8", (16 << 10,)),), block_tokens=16)
    tokens = [n % 7 for n in range(900)]
    with Store.open(path, max_bytes=8 << 20) as store, SessionTier(store, uninterrupted(layout, tokens)) as tier:
        tier.cascade(tokens)
        tier.flush()
        assert (tier.stats.save_misses, tier.stats.faults) == (1, 1)
        engine = HashEngine(layout)
        with SessionTier(store, engine) as other:
            position = other.promote(tokens)
            assert 0 < position < 900
            engine.feed(tokens[position:])
        assert engine.state_hash() == uninterrupted(layout, tokens).state_hash()


def test_a_reader_that_pins_makes_misses_only(path: Path) -> None:
    """Saves that are refused because a lease pins the space are counted misses, and pass when the lease is gone."""
    from tests.support import wide_layout

    with Store.open(path, max_bytes=CAP) as store:
        engine = HashEngine(wide_layout())
        with SessionTier(store, engine) as tier:
            for n in range(25):
                engine.reset()
                engine.feed([n, *range(199)])
                tier.cascade([n, *range(199)])
            tier.flush()
            assert tier.stats.save_misses == 0
            with tier.namespace.lease([24, *range(199)]) as lease:
                assert lease.length == 200
                for n in range(100, 130):
                    engine.reset()
                    engine.feed([n, *range(199)])
                    tier.cascade([n, *range(199)])
                tier.flush()
                assert tier.stats.save_misses > 0
                lease.validate()
            missed = tier.stats.save_misses
            tier.cascade([129, *range(199)])
            tier.flush()
            assert tier.stats.save_misses == missed


def test_a_file_that_was_cut_off_is_a_clean_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the file has lost the end of a session, promote starts clean, by name and without a signal; cascade saves nothing."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(HYBRID)
        with SessionTier(store, uninterrupted(HYBRID, TOKENS)) as tier:
            tier.cascade(TOKENS)
        with namespace.lease(TOKENS) as lease:
            last = max(block.file_offset for block in lease.blocks)
        size = data_file(path).stat().st_size
        os.truncate(data_file(path), last // 4096 * 4096)
        engine = HashEngine(HYBRID)
        with SessionTier(store, engine) as tier, caplog.at_level(logging.WARNING, "kvstore"):
            assert tier.promote([*TOKENS, 1]) == 0
            assert "cut off" in caplog.text
            engine.feed([*TOKENS, 1])
            assert engine.state_hash() == uninterrupted(HYBRID, [*TOKENS, 1]).state_hash()
            tier.cascade([*TOKENS, 1])
        assert data_file(path).stat().st_size == last // 4096 * 4096
        os.truncate(data_file(path), size)


def _v(captured: Captured) -> Any:
    return captured.streams["v"]


SPOILS: dict[str, Callable[[Captured], Any]] = {
    "a mapping": lambda c: dict(c.streams),
    "nothing": lambda c: None,
    "a stream too few": lambda c: Captured({"k": c.streams["k"]}, c.states),
    "rows too few": lambda c: Captured({**c.streams, "v": _v(c)[:-1]}, c.states),
    "another dtype": lambda c: Captured({**c.streams, "v": _v(c).astype(np.int16)}, c.states),
    "a state too few": lambda c: Captured(c.streams, {"r": c.states["r"]} if c.states else {}),
    "a state beyond its bound": lambda c: Captured(c.streams, {**c.states, "blob": np.zeros(91, np.uint8)}),
}


@pytest.mark.parametrize("spoil", sorted(SPOILS))
def test_a_capture_that_does_not_fit_is_misuse(store: Store, spoil: str) -> None:
    """An engine that hands out something that doesn't fit the layout is an ArrayError, and nothing is stored."""
    engine = BadCapture(HYBRID, SPOILS[spoil])
    engine.feed(TOKENS[:10])
    with SessionTier(store, engine) as tier:
        with pytest.raises(ArrayError):
            tier.cascade(TOKENS[:10])
        tier.flush()
        assert (tier.stats.saved, tier.stats.save_misses, tier.stats.faults) == (0, 0, 0)
        assert tier.promote(TOKENS[:11]) == 0
    assert store.stats().blocks == 0


def test_a_capture_that_raises_is_a_miss(store: Store) -> None:
    """An engine that can't hand out its rows makes a counted miss of the cascade."""

    def broken(captured: Captured) -> Captured:
        raise RuntimeError("device lost")

    engine = BadCapture(PLAIN, broken)
    engine.feed(TOKENS)
    with SessionTier(store, engine) as tier:
        result = tier.cascade(TOKENS)
        assert "device lost" in result.missed
        assert result.captured_tokens == 0
        assert (tier.stats.faults, tier.stats.saved) == (1, 0)
        assert tier.stats.save_misses == 1
        assert tier.flush(5)


def test_states_at_another_position_are_not_taken(store: Store) -> None:
    """When the engine stands elsewhere than at the end of what is cascaded, rows are saved, and the miss is counted."""
    engine = uninterrupted(HYBRID, TOKENS)
    with SessionTier(store, engine) as tier:
        assert "no states" in tier.cascade(TOKENS[:50]).missed
        tier.flush()
        assert (tier.stats.saved, tier.stats.save_misses) == (0, 1)
        assert tier.promote(TOKENS) == 0
        with tier.namespace.lease(TOKENS) as lease:
            assert not lease
    assert (store.stats().nodes, store.stats().blocks) == (1, 4)


BAD_TOKENS: list[Any] = [[], [-1], [1 << 32], [[1, 2]], [0.5], None]


@pytest.mark.parametrize("call", ["promote", "cascade"])
@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_tokens_that_are_none_are_misuse(filled: Store, call: str, tokens: Any) -> None:
    """What is no token array raises from both calls, and the engine is not touched."""
    engine = uninterrupted(PLAIN, TOKENS)
    before = engine.state_hash()
    with SessionTier(filled, engine) as tier, pytest.raises(TokensError):
        getattr(tier, call)(tokens)
    assert engine.state_hash() == before


@pytest.mark.parametrize("what", ["tier", "store"])
def test_use_after_close_is_misuse(path: Path, what: str) -> None:
    """A closed tier, or one over a closed store, raises StoreClosedError from promote and cascade; closing twice does nothing."""
    store = Store.open(path, max_bytes=CAP)
    tier = SessionTier(store, uninterrupted(PLAIN, TOKENS))
    if what == "tier":
        tier.close()
        tier.close()
    else:
        store.close()
    for call in (tier.promote, tier.cascade):
        with pytest.raises(StoreClosedError):
            call(TOKENS)
    tier.close()
    store.close()


def test_every_error_has_the_one_root() -> None:
    """All errors of the library are KVStoreErrors, and each is a builtin that callers already catch."""
    from kvstore import errors

    builtin = (ValueError, TypeError, OSError, LookupError, RuntimeError, BufferError, TimeoutError, ImportError)
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, KVStoreError)
        assert kind is KVStoreError or issubclass(kind, builtin), name
        assert kind.__doc__
    assert issubclass(BlockDamaged, OSError)
