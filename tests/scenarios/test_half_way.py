"""Savers that die, fail or stop half way: what they leave comes back with the next write, or is taken up by who goes on."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore import Namespace, SessionTier, Store, WriteBehind
from kvstore.env import Process, is_running, this_process
from kvstore.errors import BaseLost, SpacePinned
from kvstore.radix import unfinished
from kvstore.records.meta import SWEEP_KEY, SaveRecord
from kvstore.saving import publish_piece, publish_states
from kvstore.saving import save as saving
from kvstore.scope import SaveUnderWay
from kvstore.testing import HashEngine, session_rows, session_states, states_equal
from kvstore.tier import behind
from tests.store.index import checkpoints_on, nodes_on
from tests.support import assert_restores, assert_sound, plain_layout, save, wait_until

from .conftest import Acting
from .steps import BIG, blocks_in

TOKENS = list(range(100, 140))
SETUP = """
import kvstore.saving.save as saving
namespace = store.namespace(BIG)
"""
BETWEEN_PIECES = SETUP + "halt(saving, 'publish_states', after=True)"
ROWS_ALONE = SETUP + "halt(saving.Saver, '_publish_states')"
SAVE = f"save(namespace, {TOKENS}, writer=1).checkpoint"


def notes(store: Store) -> list[SaveRecord]:
    """The notes of saves under way."""
    with store._scope.environment.reading() as txn:
        return [record for _, record in unfinished.noted(txn) if record is not None]


def write_something(store: Store) -> None:
    """Be the next writer: save something small elsewhere, and evict it."""
    namespace = store.namespace(plain_layout())
    save(namespace, [1, 2, 3])
    namespace.evict()


def assert_states(namespace: Namespace, tokens: list[int], writer: int) -> None:
    """Require that a prompt is restored whole, with the states of one writer."""
    with namespace.lease(tokens) as lease:
        assert lease.length == len(tokens)
        assert states_equal(lease.states(), session_states(BIG, tokens, writer=writer))
        lease.validate()


def test_a_saver_killed_between_pieces_of_states(store: Store, actor: Acting) -> None:
    """A saver is killed between the pieces of its states: whoever writes next, anything anywhere, gets their space back."""
    namespace = store.namespace(BIG)
    saver = actor(BETWEEN_PIECES)
    saver.start(SAVE)
    saver.until("publish_states")
    with_piece = blocks_in(store)
    [note] = notes(store)
    assert (note.pid, note.position) == (saver.process.pid, 40)
    write_something(store)
    assert (blocks_in(store), notes(store)) == (with_piece, [note])  # it is alive
    saver.kill()
    write_something(store)
    assert notes(store) == []
    assert blocks_in(store) == with_piece - 1 == 3
    assert checkpoints_on(namespace, TOKENS, complete=False) == []
    assert namespace.match(TOKENS) is None
    result = save(namespace, TOKENS, writer=2)  # the rows were no orphans: they are not written again
    assert (result.stored_tokens, result.new_tokens) == (40, 0)
    with namespace.lease(TOKENS) as lease:
        assert states_equal(lease.states(), session_states(BIG, TOKENS, writer=2))
    assert blocks_in(store) == 5


def test_a_saver_killed_between_rows_and_states(store: Store, actor: Acting) -> None:
    """A saver is killed between its rows and its states: a prefix that nobody can restore, which an eviction elsewhere takes."""
    namespace = store.namespace(BIG)
    saver, other = actor(ROWS_ALONE), actor(SETUP)
    saver.start(SAVE)
    saver.until("_publish_states")
    saver.kill()
    assert blocks_in(store) == 3
    assert other.do(f"namespace.match({TOKENS})") == "None"
    assert other.do("store.evict(free_bytes=1).tokens") == "40"  # all of it: nothing of it could be restored
    assert blocks_in(store) == store.stats().nodes == 0
    assert other.do(f"save(namespace, {TOKENS}, writer=3).checkpoint") == "True"
    assert_restores_of(namespace, 3)


def assert_restores_of(namespace: Namespace, writer: int) -> None:
    """Require that the session is restored whole, rows and states, as one writer saved it."""
    assert_restores(namespace, TOKENS, 40, writer=writer)


def test_a_stopped_saver_keeps_what_it_has_written(store: Store, actor: Acting) -> None:
    """A saver that is stopped between pieces is no dead one: others write meanwhile, and it goes on where it was."""
    namespace = store.namespace(BIG)
    saver = actor(BETWEEN_PIECES)
    saver.start(SAVE)
    saver.until("publish_states")
    saver.stop()
    write_something(store)
    assert checkpoints_on(namespace, TOKENS, complete=False) == [40]
    assert_sound(store)
    saver.go_on()
    saver.go()
    assert saver.answer() == "True"
    assert_restores_of(namespace, 1)
    assert (notes(store), blocks_in(store)) == ([], 5)


def test_the_same_states_are_completed_under_a_stopped_saver(store: Store, actor: Acting) -> None:
    """Another process saves the same session while a saver is stopped between pieces: one copy, two successes."""
    namespace = store.namespace(BIG)
    saver, other = actor(BETWEEN_PIECES), actor(SETUP)
    saver.start(SAVE)
    saver.until("publish_states")
    saver.stop()
    assert other.do(f"save(namespace, {TOKENS}, writer=2).checkpoint") == "True"
    assert (notes(store), blocks_in(store)) == ([], 5)
    saver.go_on()
    saver.go()
    assert saver.answer() == "True"
    with namespace.lease(TOKENS) as lease:  # rows of the first, states of the one who had them all first
        assert states_equal(lease.states(), session_states(BIG, TOKENS, writer=2))
    assert (notes(store), blocks_in(store)) == ([], 5)


def test_the_session_is_evicted_under_a_stopped_saver(store: Store, actor: Acting) -> None:
    """Another process evicts the session of which a saver is stopped between pieces: it starts over, and all of it is stored."""
    namespace = store.namespace(BIG)
    saver, other = actor(BETWEEN_PIECES), actor(SETUP)
    saver.start(SAVE)
    saver.until("publish_states")
    saver.stop()
    assert other.do(f"namespace.evict({TOKENS}).tokens") == "40"
    assert (notes(store), blocks_in(store)) == ([], 0)
    saver.go_on()
    saver.go()
    assert saver.answer() == "True"
    assert_restores_of(namespace, 1)
    assert (notes(store), blocks_in(store)) == ([], 5)


def test_a_split_hands_the_note_over(store: Store, actor: Acting) -> None:
    """While a saver is between pieces its leaf is extended and split behind it: the note goes with the checkpoint."""
    namespace = store.namespace(BIG)
    for ends_well in (True, False):
        saver = actor(BETWEEN_PIECES)
        saver.start(SAVE)
        saver.until("publish_states")
        save(namespace, [*TOKENS, *range(20)], states=False, start=32)
        [leaf] = nodes_on(namespace, TOKENS)
        assert [note.node for note in notes(store)] == [leaf.node]
        save(namespace, [*TOKENS, *range(10), 99], states=False)
        upper, lower = nodes_on(namespace, [*TOKENS, *range(20)])
        assert ([note.node for note in notes(store)], lower.node) == ([upper.node], leaf.node)
        assert_sound(store)
        if ends_well:
            saver.go()
            assert saver.answer() == "True"
            assert_restores_of(namespace, 1)
        else:
            saver.kill()
            write_something(store)
            assert checkpoints_on(namespace, TOKENS, complete=False) == []
        assert notes(store) == []
        assert_sound(store)
        namespace.evict()


def test_an_eviction_for_space_leaves_what_is_being_saved(store: Store, actor: Acting) -> None:
    """Somebody evicts all there is while a save is between its pieces: what that has stored so far stays."""
    namespace = store.namespace(BIG)
    save(namespace, [1, 2, 3])
    saver, other = actor(BETWEEN_PIECES), actor(SETUP)
    saver.start(SAVE)
    saver.until("publish_states")
    assert other.do("store.evict(free_bytes=1 << 40).tokens") == "3"
    assert checkpoints_on(namespace, TOKENS, complete=False) == [40]
    saver.go()
    assert saver.answer() == "True"
    assert_restores_of(namespace, 1)
    assert store.evict(free_bytes=1 << 40).tokens == 40  # nobody is at it any more


@pytest.mark.parametrize("what", ["another boot", "another process of that number", "a damaged note", "a note of nothing"])
def test_notes_of_nobody(store: Store, what: str) -> None:
    """A note from before a reboot or of a number that is another's by now is of a dead process; a damaged one is swept."""
    namespace = store.namespace(BIG)
    prompt = np.array(TOKENS, "<u4").tobytes()
    save(namespace, TOKENS, states=False)
    put_first_piece(namespace, prompt)
    [note] = notes(store)
    key = SaveRecord.key_of(note.save_id)
    changes = {
        "another boot": replace(note, boot=bytes(15) + b"\x01").encode(),
        "another process of that number": replace(note, started=note.started - 1).encode(),
        "a damaged note": note.encode()[:-1] + b"\xff",
        "a note of nothing": replace(note, position=39, started=note.started - 1).encode(),
    }
    store._scope.saves.begin(OURS)  # a live save of this process has that very number
    with store._scope.environment.write(5.0) as txn:
        txn.put(txn.db.meta, key, changes[what])
    write_something(store)
    assert notes(store) == []
    assert checkpoints_on(namespace, TOKENS, complete=False) == []
    with store._scope.environment.reading() as txn:
        assert txn.get(SWEEP_KEY, txn.db.meta) is None
    assert blocks_in(store) == 3


OURS = SaveUnderWay()


def put_first_piece(namespace: Namespace, prompt: bytes) -> None:
    """Write the first piece of a checkpoint's states, as a save that goes on does."""
    from kvstore.records.states import pack_states, packed_states_bytes
    from kvstore.saving import StatesPiece, gather_states

    states = session_states(BIG, TOKENS)
    blocks = list(gather_states(namespace.scope, pack_states(BIG, states)))
    OURS.save_id = 0
    publish_states(namespace.scope, prompt, StatesPiece(blocks[:1], packed_states_bytes(BIG, states), last=False), OURS)
    namespace.scope.store.saves.end(OURS, whole=True)


FAILURES: list[BaseException] = [SpacePinned("pinned"), BaseLost("lost"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("error", FAILURES, ids=[type(error).__name__ for error in FAILURES])
def test_a_save_that_fails_half_way_takes_its_own_back(store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A save that fails or is interrupted between pieces of its states leaves nothing of them, with no further write."""
    namespace = store.namespace(BIG)
    calls: list[Any] = []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 2 == 0:
            raise error
        return publish_states(*args)

    monkeypatch.setattr(saving, "publish_states", fail)
    with pytest.raises(type(error)):
        save(namespace, TOKENS)
    assert (notes(store), blocks_in(store)) == ([], 3)
    monkeypatch.undo()
    assert save(namespace, TOKENS).checkpoint
    assert_restores(namespace, TOKENS, 40)


def test_what_could_not_be_taken_back_at_once_goes_with_the_next_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lock is not to be had when a save fails, the process's next write takes back what it left."""
    namespace, environment = store.namespace(BIG), store._scope.environment
    save(namespace, TOKENS, states=False)
    put_first_piece(namespace, np.array(TOKENS, "<u4").tobytes())
    store._scope.saves.begin(OURS)
    monkeypatch.setattr("kvstore.scope.store._GIVE_UP_TIMEOUT", 0.0)
    with environment.write(5.0):
        store._scope.give_up(OURS)
    assert len(notes(store)) == 1
    assert store._scope.pending
    write_something(store)
    assert (notes(store), blocks_in(store), store._scope.pending) == ([], 3, False)


def test_a_cascade_that_fails_half_way_takes_its_own_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade whose states fail between pieces is a counted miss, and nothing of them is left once it is counted."""
    engine = HashEngine(BIG)
    engine.feed(TOKENS)
    pieces: list[Any] = []

    def fail(scope: Any, piece: Any, **options: Any) -> Any:
        pieces.append(piece)
        if len(pieces) == 3:  # rows, states, states
            raise SpacePinned("pinned")
        return publish_piece(scope, piece, **options)

    monkeypatch.setattr(behind, "publish_piece", fail)
    with SessionTier(store, engine) as tier:
        tier.cascade(TOKENS)
        tier.flush()
        assert (tier.stats.saved, tier.stats.save_misses) == (0, 1)
        assert (notes(store), blocks_in(store)) == ([], 3)
        tier.cascade(TOKENS)
        tier.flush()
        assert tier.stats.saved == 1
    assert_sound(store)
    assert session_rows(BIG, TOKENS)["k"].shape == (40, 64)


def test_a_cascade_that_is_dropped_half_way_takes_its_own_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade that finds no room for its last piece while the one before is being written leaves nothing of its states."""
    engine = HashEngine(BIG)
    engine.feed(TOKENS)
    written, dropped = threading.Event(), threading.Event()
    pieces: list[Any] = []

    def publish(scope: Any, piece: Any, **options: Any) -> Any:
        grown = publish_piece(scope, piece, **options)
        pieces.append(piece)
        if len(pieces) == 2:  # rows, states
            assert len(notes(store)) == 1
            written.set()
            assert dropped.wait(60)
        return grown

    class Writing(WriteBehind):
        def put(self, session: Any, piece: Any, size: int) -> bool:
            if piece.states is not None and piece.states.last:
                assert written.wait(60)
            return super().put(session, piece, size)

    monkeypatch.setattr(behind, "publish_piece", publish)
    queue = Writing(max_bytes=1 << 10, when_full="drop")
    monkeypatch.setattr(queue, "max_bytes", 1250 << 10)  # rows and the first states, not the others as well
    with SessionTier(store, engine, write_behind=queue) as tier:
        assert "bound" in tier.cascade(TOKENS).missed
        dropped.set()
        tier.flush()
        wait_until(lambda: tier.stats.save_misses == 1)
        assert (notes(store), blocks_in(store)) == ([], 3)
    queue.close()
    assert len(pieces) == 2


def test_who_runs(actor: Acting) -> None:
    """A process runs until it is dead, stopped or not; its number, another start or another boot are not enough."""
    other = actor("from kvstore.env import this_process", opens=False)
    pid, started = eval(other.do("(this_process().pid, this_process().started)"))
    process = Process(pid, started, this_process().boot)
    assert pid == other.process.pid
    assert is_running(process)
    assert is_running(replace(process, started=0))
    assert not is_running(replace(process, started=started + 1))
    assert not is_running(replace(process, boot=bytes(15) + b"\x01"))
    other.stop()
    assert is_running(process)
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
    assert not is_running(process)
    other.kill()
    assert not is_running(process)
    assert is_running(this_process())
    assert not is_running(Process(0, 0, bytes(16)))
