"""A process is stopped while it holds the write lock, or the store: the others' calls end in bounded time, by name or counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore import SessionTier, Store
from kvstore.errors import StoreBusyError, StoreDamagedError, WriteLockTimeout
from kvstore.store.resize import resize
from kvstore.testing import HashEngine
from tests.support import CAP, assert_restores, assert_sound, hybrid_layout, plain_layout, run_child, save

from .conftest import Acting
from .steps import Actor

STORED = list(range(100, 140))
NEW = list(range(500, 530))
PAST = 0.2  # seconds that a call waits for others

WITH_STORE = """
import kvstore.eviction as evicting
import kvstore.saving.publish as publishing
import kvstore.store.namespace as removing
namespace = store.namespace(plain_layout())
"""
WITHOUT = """
import kvstore.env.environment as environments
import kvstore.env.opening as opening
import kvstore.env.resizing as resizing
"""
HOLDING_THE_WRITE_LOCK = {
    "a save": (WITH_STORE + "halt(publishing, 'grow', after=True)", True, "grow", f"save(namespace, {NEW}).tokens"),
    "an eviction": (
        WITH_STORE + "halt(removing, 'evict_point', after=True)",
        True,
        "evict_point",
        f"namespace.evict({STORED}).tokens",
    ),
    "an eviction for space": (
        WITH_STORE + "halt(evicting, 'evict_point', after=True)",
        True,
        "evict_point",
        "store.evict(free_bytes=1).nodes",
    ),
    "an opening": (
        WITHOUT + "halt(opening, '_read_identity')",
        False,
        "_read_identity",
        "Store.open(path, lock_timeout=20.0).path",
    ),
}
HOLDING_THE_STORE = {
    "raising the cap": (WITHOUT + "halt(environments.Environment, 'set_map_bytes', after=True)", "set_map_bytes", 2 * CAP),
    "lowering the cap": (WITHOUT + "halt(resizing, '_rebuild_offsets', after=True)", "_rebuild_offsets", CAP // 2),
}


OPENER = f"""
try:
    Store.open(path, lock_timeout={PAST})
except KVStoreError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("what", HOLDING_THE_WRITE_LOCK)
def test_behind_a_process_stopped_with_the_write_lock(path: Path, actor: Acting, what: str) -> None:
    """Behind a process that is stopped with the write lock every call comes back; once it goes on, all is well."""
    setup, opens, place, doing = HOLDING_THE_WRITE_LOCK[what]
    with Store.open(path, max_bytes=CAP, lock_timeout=PAST) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, STORED)
        save(namespace, STORED[:20])
        stopped: Actor = actor(setup, opens=opens)
        stopped.start(doing)
        stopped.until(place)
        stopped.stop()
        assert run_child(OPENER, path) == "StoreBusyError"
        everything_comes_back(store)
        stopped.go_on()
        stopped.go()
        assert stopped.answer()
        with Store.open(path) as again:
            assert again.max_bytes == CAP
        save(namespace, NEW)
        save(namespace, STORED)
        assert_restores(namespace, NEW, len(NEW))
        assert_restores(namespace, STORED, len(STORED))
        assert_sound(store)


def everything_comes_back(store: Store) -> None:
    """Call everything: what reads works, what writes fails by name or is a counted miss."""
    namespace = store.namespace(plain_layout())
    assert_restores(namespace, STORED, len(STORED))
    assert_sound(store)
    assert store.stats().nodes == 1
    assert len(store.namespaces()) == 1
    writes: list[Callable[[], object]] = [
        lambda: save(namespace, [*STORED, *NEW]),
        lambda: save(store.namespace(hybrid_layout()), NEW),
        lambda: namespace.evict(STORED),
        lambda: namespace.evict(),
        lambda: store.evict(free_bytes=1 << 20),
        lambda: store.evict_namespace(namespace.namespace_id),
    ]
    for write in writes:
        with pytest.raises(WriteLockTimeout):
            write()
    engine = HashEngine(plain_layout())
    with SessionTier(store, engine) as tier:
        engine.feed(NEW)
        tier.cascade(NEW)
        assert tier.flush(30)
        assert (tier.stats.saved, tier.stats.save_misses) == (0, 1)
        assert tier.promote([*NEW, 1]) == 0
        assert tier.promote([*STORED, 1]) in (0, len(STORED))  # in time, whatever it finds
    with Store.open(store.path, lock_timeout=PAST) as second:
        second.namespace(plain_layout()).match(STORED)


@pytest.mark.parametrize("what", HOLDING_THE_STORE)
def test_behind_a_process_stopped_while_it_resizes(path: Path, actor: Acting, what: str) -> None:
    """A store that a stopped process is resizing can't be opened or resized, by name and in bounded time; then it can."""
    setup, place, cap = HOLDING_THE_STORE[what]
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), STORED)
    stopped = actor(setup, opens=False)
    stopped.start(f"Store.open(path).resize({cap}).max_bytes")
    stopped.until(place)
    stopped.stop()
    with pytest.raises(StoreBusyError):
        Store.open(path, lock_timeout=PAST)
    with pytest.raises(StoreBusyError):
        resize(path, 3 * CAP, lock_timeout=PAST)
    stopped.go_on()
    stopped.go()
    assert stopped.answer() == str(cap)
    with Store.open(path) as store:
        assert store.max_bytes == cap
        assert_restores(store.namespace(plain_layout()), STORED, len(STORED))
        save(store.namespace(plain_layout()), NEW)
        assert_sound(store)


@pytest.mark.parametrize("what", [*HOLDING_THE_WRITE_LOCK, *HOLDING_THE_STORE])
def test_a_process_killed_where_others_would_wait(path: Path, actor: Acting, what: str) -> None:
    """A process is killed with the write lock, or while it resizes: the next opener and the next writer go on at once."""
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(path, max_bytes=CAP))
        save(store.namespace(plain_layout()), STORED)
        if what in HOLDING_THE_STORE:
            setup, place, cap = HOLDING_THE_STORE[what]
            opens, doing = False, f"Store.open(path).resize({cap}).max_bytes"
            store.close()
        else:
            setup, opens, place, doing = HOLDING_THE_WRITE_LOCK[what]
        killed = actor(setup, opens=opens)
        killed.start(doing)
        killed.until(place)
        killed.kill()
        if what in HOLDING_THE_STORE:
            store = stack.enter_context(Store.open(path))
        namespace = store.namespace(plain_layout())
        assert_restores(namespace, STORED, len(STORED))
        save(namespace, NEW)
        assert_restores(namespace, NEW, len(NEW))
        assert_sound(store)
        assert not store.stats().readers_pinning


@pytest.mark.parametrize("name", ["lock.mdb", "open.lock", "write.lock"])
def test_a_lock_file_is_deleted_under_two_processes(path: Path, actor: Acting, name: str) -> None:
    """A lock file is deleted under two users: neither writes again, though a third who comes later makes new ones and may."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, STORED)
        other = actor(WITH_STORE)
        assert other.do(f"restored(namespace, {STORED})") == "40"
        (path / name).unlink()
        other.start(f"save(namespace, {NEW}).tokens")
        assert other.failure().startswith("StoreDamagedError: a lock file")
        with pytest.raises(StoreDamagedError, match="deleted or replaced"):
            save(namespace, NEW)
        assert_restores(namespace, STORED, 40)
        assert other.do(f"restored(namespace, {STORED})") == "40"
        assert_sound(store)
        other.do("store.close()")
    with Store.open(path) as store:  # closed everywhere and opened again: all is well
        save(store.namespace(plain_layout()), NEW)
        assert_restores(store.namespace(plain_layout()), NEW, len(NEW))
        assert_sound(store)
