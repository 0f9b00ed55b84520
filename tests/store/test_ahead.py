"""Blocks prepared while others are published: in portions, in order, given back whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import SaveResult, Store
from kvstore.env import Environment, Writer
from kvstore.records.constants import PAGE_HEADER, PAYLOAD_ALIGN
from kvstore.staging import BufferPool
from tests.support import assert_restores, assert_sound, restored, run_child, save, wide_layout

CAP = 1 << 30  # a save of up to 21 MiB is one transaction
TOKENS = list(range(9 * 128))  # nine blocks of 2 MiB, two a portion


class Watched(BufferPool):
    """A pool that says when buffers are taken, counts them, and may refuse one."""

    def __init__(self, *, refuse: int = -1) -> None:
        super().__init__(48 << 20, align=PAYLOAD_ALIGN, skew=PAGE_HEADER)
        self.taken = self.out = 0
        self.refuse = refuse
        self.before_take: Any = lambda number: None

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """Take one, unless it is the one to be refused."""
        self.before_take(self.taken)
        self.taken += 1
        if self.taken - 1 == self.refuse:
            raise MemoryError("no more buffers")
        self.out += 1
        return super().take(length)

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Take one back."""
        self.out -= 1
        super().give(buffer)


def test_a_transaction_begins_before_all_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a save in one transaction the last blocks are prepared when the first are on their way: or it never ends."""
    layout, began, write = wide_layout(16384, 128), threading.Event(), Environment.write

    @contextmanager
    def watched_write(self: Environment, *args: Any, **options: Any) -> Iterator[Writer]:
        with write(self, *args, **options) as txn:
            began.set()
            yield txn

    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        pool = store._scope.pool = Watched()
        with store._scope.environment.reading() as txn:
            before = txn.transaction
        late: list[bool] = []
        pool.before_take = lambda number: late.append(began.wait(30)) if number == 8 else None
        monkeypatch.setattr(Environment, "write", watched_write)
        save(namespace, TOKENS)
        with store._scope.environment.reading() as txn:
            assert txn.transaction == before + 1
        assert late == [True]
        assert (pool.taken, pool.out) == (9, 0)
        assert_restores(namespace, TOKENS, len(TOKENS))
        assert_sound(store)


@pytest.mark.parametrize("refused", [0, 1, 2, 7, 8, 17, 26])
def test_no_memory_for_a_block(tmp_path: Path, refused: int) -> None:
    """A block that can't be prepared fails the save, in one transaction or in pieces: what was published stays, no buffer does."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout(16384, 128))
        pool = store._scope.pool = Watched(refuse=refused)
        tokens = TOKENS if refused < 9 else list(range(27 * 128))
        with pytest.raises(MemoryError, match="no more buffers"):
            save(namespace, tokens)
        lost = 1 if refused % 2 else 0  # the one that its portion had before it: it goes with the exception
        assert 0 <= pool.out <= lost
        published = restored(namespace, tokens)
        assert published % 128 == 0
        assert published <= refused * 128
        assert published == 0 or len(tokens) > len(TOKENS)
        pool.refuse = -1
        save(namespace, tokens)
        assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)


def test_what_others_have_stored_meanwhile(tmp_path: Path) -> None:
    """Two that save one session at the same time: each is told that all of it is stored, and each byte is there once."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout(16384, 128))
        pool = store._scope.pool = Watched()
        tokens = list(range(27 * 128))
        results: list[SaveResult] = []
        saving = [threading.Thread(target=lambda: results.append(save(namespace, tokens))) for _ in range(2)]
        for thread in saving:
            thread.start()
        for thread in saving:
            thread.join()
        assert [result.tokens for result in results] == [len(tokens)] * 2
        assert pool.out == 0
        assert store.stats().blocks == 27
        assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)


def test_at_the_cap(tmp_path: Path) -> None:
    """Where something must be evicted for it, a save of several portions counts what is new of it, and evicts for that alone."""
    with Store.open(tmp_path / "s", max_bytes=CAP // 4) as store:
        namespace = store.namespace(wide_layout(16384, 32))
        sessions = [list(range(first, first + 9 * 32)) for first in range(0, 60_000, 1000)]  # two portions, one transaction
        for tokens in sessions:
            save(namespace, tokens)
            assert_restores(namespace, tokens, len(tokens))
        assert store._scope.counters.evicted_nodes
        before, stored = store._scope.counters.evicted_tokens, store.stats().blocks
        longer = sessions[-1] + list(range(70_000, 70_000 + 9 * 32))
        save(namespace, longer)
        assert store._scope.counters.evicted_tokens - before <= 2 * 9 * 32  # what it needs, and the rest of a session
        assert store.stats().blocks >= stored - 9
        assert_restores(namespace, longer, len(longer))
        assert_sound(store)


def test_where_no_thread_is_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interpreter starts no thread any more, a save prepares its blocks itself: in one transaction, and in pieces."""

    def refused(self: ThreadPoolExecutor, *args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout(16384, 128))
        pool = store._scope.pool = Watched()
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "submit", refused)
            for tokens in (TOKENS[:200], TOKENS, [7, *range(27 * 128)]):
                save(namespace, tokens)
        assert pool.out == 0
        for tokens in (TOKENS[:200], TOKENS, [7, *range(27 * 128)]):
            assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)


EXIT = """
import atexit
store = Store.open(path, max_bytes=1 << 30)
namespace = store.namespace(wide_layout(16384, 128))
def last():
    save(namespace, list(range(9 * 128)))
    store.close()
atexit.register(last)
"""


def test_a_save_at_the_interpreters_end(tmp_path: Path) -> None:
    """A server that saves as it goes down is not too late for a save of several portions."""
    run_child(EXIT, tmp_path / "s")
    with Store.open(tmp_path / "s") as store:
        assert_restores(store.namespace(wide_layout(16384, 128)), TOKENS, len(TOKENS))
        assert_sound(store)
