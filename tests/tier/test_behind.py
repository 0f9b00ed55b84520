"""Writing behind: in order, bounded in bytes, flushed at close and at interpreter exit; many tiers over one store."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore import Layout, SessionTier, Store, Stream, WriteBehind
from kvstore.testing import HashEngine
from tests.support import CAP, assert_sound, examples, run_child, wait_until

from .engines import HYBRID, PLAIN, uninterrupted

TOKENS = list(range(300))
HEAVY = Layout((Stream("k", "u8", (4096,)),), block_tokens=16, model="heavy")


class Busy:
    """Holds the store's write lock in this process until it is told to let go, so that nothing that is queued gets through."""

    def __init__(self, store: Store) -> None:
        self._go, self._held = threading.Event(), threading.Event()
        self._environment = store.namespace(HEAVY).scope.store.environment
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def _hold(self) -> None:
        with self._environment.write(5.0):
            self._held.set()
            self._go.wait(60)

    def __enter__(self) -> Busy:
        self._thread.start()
        assert self._held.wait(10)
        return self

    def let_go(self) -> None:
        """Let the writers through."""
        self._go.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.let_go()


def test_a_full_queue_blocks_the_cascade_until_there_is_room(path: Path) -> None:
    """When more is queued than the bound allows, a cascade waits, and goes on when the writer catches up; all of it is stored."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        behind = WriteBehind(max_bytes=256 << 10)
        tier = SessionTier(store, uninterrupted(HEAVY, TOKENS), write_behind=behind)
        with Busy(store) as busy:
            cascade = threading.Thread(target=tier.cascade, args=(TOKENS,), daemon=True)
            cascade.start()
            cascade.join(0.5)
            assert cascade.is_alive()  # 1.2 MB do not fit into 256 KiB
            assert behind.under_way(tier.namespace.scope, b"\0\0\0\0") == 1
            assert not behind.flush(0.01)
            busy.let_go()
            cascade.join(30)
            assert not cascade.is_alive()
        tier.close()
        behind.close()
        assert tier.stats.saved == 1
        with SessionTier(store, HashEngine(HEAVY)) as again:
            assert again.promote([*TOKENS, 1]) == 300
        assert_sound(store)


def test_a_full_queue_drops_where_it_is_told_to(path: Path) -> None:
    """With when_full="drop" a cascade that finds no room gives up at once, as a counted miss; what was queued before is stored."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        behind = WriteBehind(max_bytes=256 << 10, when_full="drop")
        first = SessionTier(store, uninterrupted(HEAVY, TOKENS[:20]), write_behind=behind)
        second = SessionTier(store, uninterrupted(HEAVY, [7] * 300), write_behind=behind)
        with Busy(store) as busy:
            assert first.cascade(TOKENS[:20]).missed == ""
            result = second.cascade([7] * 300)
            assert "bound" in result.missed
            assert result.captured_tokens == 0
            busy.let_go()
        assert behind.flush(30)
        assert (first.stats.saved, first.stats.save_misses) == (1, 0)
        assert (second.stats.saved, second.stats.save_misses) == (0, 1)
        found = first.namespace.match(TOKENS)
        assert found is not None
        assert found.length == 20
        second.cascade([7] * 300)  # smaller pieces may be dropped again while the writer is busy, never with an exception
        behind.close()
        assert_sound(store)


@pytest.mark.parametrize("bound", [1, 1000])
def test_a_piece_larger_than_the_bound_passes_alone(store: Store, bound: int) -> None:
    """However small the bound, a cascade gets through."""
    behind = WriteBehind(max_bytes=bound)
    with SessionTier(store, uninterrupted(HYBRID, TOKENS), write_behind=behind) as tier:
        tier.cascade(TOKENS)
        assert tier.flush(30)
        assert tier.promote([*TOKENS, 1]) == 300
    behind.close()


@pytest.mark.parametrize("bad", [{"max_bytes": 0}, {"max_bytes": -1}, {"when_full": "wait"}])
def test_a_bound_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    """The bound is positive, and there are two things to do when it is reached."""
    with pytest.raises(ValueError, match=r"max_bytes.*when_full"):
        WriteBehind(**bad)


def test_a_flush_gives_up_in_time(path: Path) -> None:
    """A flush with a timeout says whether everything is stored."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store, SessionTier(store, uninterrupted(HEAVY, TOKENS)) as tier:
        assert tier.flush(0)
        with Busy(store) as busy:
            tier.cascade(TOKENS[:100])
            assert not tier.flush(0.05)
            busy.let_go()
            assert tier.flush(30)
        assert tier.stats.saved == 1


def test_closing_flushes(store: Store) -> None:
    """What was cascaded before a close is stored after it, states and all; a cascade after it is refused."""
    tier = SessionTier(store, uninterrupted(HYBRID, TOKENS))
    tier.cascade(TOKENS)
    tier.close()
    assert tier.stats.saved == 1
    found = tier.namespace.match(TOKENS)
    assert found is not None
    assert found.length == 300


EXIT = """
from tests.tier.engines import *
store = Store.open(path, max_bytes=CAP)
tier = SessionTier(store, uninterrupted(HYBRID, list(range(300))))
tier.cascade(list(range(300)))
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del tier, store"])
def test_the_interpreters_exit_flushes(path: Path, end: str) -> None:
    """A process that ends without closing anything has stored what it cascaded."""
    run_child(EXIT.format(end=end), path)
    with Store.open(path) as store, SessionTier(store, HashEngine(HYBRID)) as tier:
        assert tier.promote([*TOKENS, 1]) == 300
        assert_sound(store)


def test_cascades_of_one_session_follow_each_other(store: Store) -> None:
    """Cascades in quick succession, each a little longer, are all stored; the last one is whole."""
    engine = HashEngine(HYBRID)
    with SessionTier(store, engine) as tier:
        for n in range(0, 300, 10):
            engine.feed(TOKENS[n : n + 10])
            tier.cascade(TOKENS[: n + 10])
        tier.flush()
        assert (tier.stats.saved, tier.stats.save_misses, tier.stats.new_tokens) == (30, 0, 300)
        assert tier.promote([*TOKENS, 1]) == 300
    assert store.stats().nodes == 1


@pytest.mark.parametrize("shared", [False, True])
def test_many_tiers_over_one_store(path: Path, shared: bool) -> None:
    """Tiers in threads, with a queue each or one for all, over one small store: every answer is that of an uninterrupted engine."""
    failures: list[BaseException] = []
    behind = WriteBehind() if shared else None
    with Store.open(path, max_bytes=CAP) as store:

        def serve(seed: int) -> None:
            chance = random.Random(seed)
            layout = PLAIN if seed % 2 else HYBRID
            engine = HashEngine(layout)
            try:
                with SessionTier(store, engine, write_behind=behind) as tier:
                    for _ in range(12):
                        tokens = [chance.randrange(2), *range(chance.randint(1, 120)), chance.randrange(3)]
                        position = tier.promote(tokens)
                        assert position == engine.position < len(tokens)
                        engine.feed(tokens[position:])
                        assert engine.state_hash() == uninterrupted(layout, tokens).state_hash()
                        tier.cascade(tokens)
                    tier.flush()
                    assert tier.stats.faults == 0
                    assert tier.stats.saved == 12
            except BaseException as error:  # whatever it is, the test has to see it
                failures.append(error)

        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if behind is not None:
            behind.close()
        assert not failures, failures
        assert_sound(store)


def test_a_session_is_under_way_until_it_is_stored(path: Path) -> None:
    """The queue knows how much of a prompt is on its way, for other tiers of the process."""
    import numpy as np

    prompt = np.array([*TOKENS[:50], 999], "<u4").tobytes()
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        behind = WriteBehind()
        with SessionTier(store, uninterrupted(HEAVY, TOKENS[:100]), write_behind=behind) as tier:
            with Busy(store) as busy:
                tier.cascade(TOKENS[:100])
                assert behind.under_way(tier.namespace.scope, prompt) == 50
                busy.let_go()
            wait_until(lambda: behind.under_way(tier.namespace.scope, prompt) == 0)
            assert tier.stats.saved == 1
        behind.close()


def test_a_promote_does_not_wait_for_other_sessions(path: Path) -> None:
    """A promote whose rows are stored goes on at once behind a writer that is stuck with a session that begins alike."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        behind = WriteBehind()
        mine, other = [0, *range(50, 90)], [0, *range(200, 290)]
        with (
            SessionTier(store, uninterrupted(HEAVY, mine), write_behind=behind) as tier,
            SessionTier(store, uninterrupted(HEAVY, other), write_behind=behind) as busy_tier,
        ):
            tier.cascade(mine)
            tier.flush()
            with Busy(store):
                busy_tier.cascade(other)
                promoted: list[int] = []
                thread = threading.Thread(target=lambda: promoted.append(tier.promote([*mine, 1])), daemon=True)
                thread.start()
                thread.join(20)
                assert promoted == [len(mine)]
                assert behind.under_way(tier.namespace.scope, b"\0\0\0\0") == 1  # the other one still is
        behind.close()


def test_a_promote_gives_up_waiting_for_its_own_rows(path: Path) -> None:
    """A promote whose rows are on their way waits for them no longer than for a lock, and then starts clean."""
    with Store.open(path, max_bytes=CAP, lock_timeout=0.3) as store:
        engine = uninterrupted(HEAVY, TOKENS[:50])
        with SessionTier(store, engine) as tier, Busy(store):
            tier.cascade(TOKENS[:50])
            assert tier.promote(TOKENS[:60]) == 0
            assert engine.position == 0


def test_what_comes_after_close_is_a_miss_and_nothing_hangs(path: Path) -> None:
    """A cascade that waits for room while the queue is closed is a counted miss; a flush afterwards returns."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        for _ in range(examples(10)):
            behind = WriteBehind(max_bytes=64 << 10)
            tier = SessionTier(store, uninterrupted(HEAVY, TOKENS), write_behind=behind)
            with Busy(store):
                cascade = threading.Thread(target=tier.cascade, args=(TOKENS,), daemon=True)
                cascade.start()
                scope = tier.namespace.scope
                wait_until(lambda behind=behind, scope=scope: behind.under_way(scope, b"\0\0\0\0") == 1)
                closing = threading.Thread(target=behind.close, daemon=True)
                closing.start()
            cascade.join(30)
            closing.join(30)
            assert not cascade.is_alive()
            assert not closing.is_alive()
            assert behind.flush(5)
            assert tier.stats.saved + tier.stats.save_misses == 1
            tier.namespace.evict()


def test_a_store_closed_before_its_tier_loses_nothing(path: Path) -> None:
    """What was cascaded is stored although the store's handle is closed before the tier."""
    store = Store.open(path, max_bytes=CAP, lock_timeout=30.0)
    tier = SessionTier(store, uninterrupted(HEAVY, TOKENS))
    with Busy(store):
        tier.cascade(TOKENS[:100])
        store.close()
    tier.close()
    assert tier.stats.save_misses + tier.stats.saved == 1
    with Store.open(path) as again, again.namespace(HEAVY).lease(TOKENS[:100]) as lease:
        assert lease.length == 100


def test_no_thread_to_write_with_is_a_miss(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread a cascade is a counted miss, nothing hangs, and a later one is saved."""
    with Store.open(path, max_bytes=CAP) as store:
        tier = SessionTier(store, uninterrupted(HEAVY, TOKENS[:50]))
        with monkeypatch.context() as patched:

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patched.setattr(threading.Thread, "start", refuse)
            assert "no thread" in tier.cascade(TOKENS[:50]).missed
            assert tier.flush(5)
        assert tier.stats.save_misses == 1
        tier.cascade(TOKENS[:50])
        tier.close()
        assert tier.stats.saved == 1


def test_a_promote_does_not_wait_for_another_salt(path: Path) -> None:
    """Rows on their way into another namespace can't match, and are not waited for."""
    with Store.open(path, max_bytes=CAP, lock_timeout=30.0) as store:
        behind = WriteBehind()
        with (
            SessionTier(store, uninterrupted(HEAVY, TOKENS[:40]), salt=b"a", write_behind=behind) as busy_tier,
            SessionTier(store, HashEngine(HEAVY), salt=b"b", write_behind=behind) as tier,
            Busy(store),
        ):
            busy_tier.cascade(TOKENS[:40])
            promoted: list[int] = []
            thread = threading.Thread(target=lambda: promoted.append(tier.promote(TOKENS[:40])), daemon=True)
            thread.start()
            thread.join(20)
            assert promoted == [0]
        behind.close()
