"""The cap holds at every instant, and what is least worth keeping goes first."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvstore import Layout, Namespace, State, Store, Stream
from kvstore.errors import StoreFullError
from kvstore.testing import session_states
from tests.support import CAP, SCALE, assert_restores, assert_sound, child, hybrid_layout, plain_layout, restored, save, wide_layout


def directory_bytes(path: Path) -> int:
    """What a directory takes on disk, and what it seems to take, whichever is more."""
    seen = [entry.stat() for entry in path.iterdir()]
    return max(sum(s.st_blocks * 512 for s in seen), sum(s.st_size for s in seen if s.st_blocks))


class Watch(threading.Thread):
    """Samples the size of a directory until it is told to stop."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.most, self.samples, self.done = path, 0, 0, False

    def run(self) -> None:
        """Sample."""
        while not self.done:
            self.most = max(self.most, directory_bytes(self.path))
            self.samples += 1
            time.sleep(0.001)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done = True
        self.join()
        self.most = max(self.most, directory_bytes(self.path))


def session(n: int, length: int = 200) -> list[int]:
    """A session of its own."""
    return [n, *range(1, length)]


LAYOUTS = {
    "wide": wide_layout(),
    "plain": plain_layout(),
    "hybrid": hybrid_layout(),
    "states": Layout((Stream("k", "u8", (512,)),), (State("r", "u8", (1 << 20,)),), block_tokens=64),
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_cap_holds_over_many_turnovers(path: Path, name: str) -> None:
    """Saving several times what fits, in sizes at random, never lifts the directory above the cap, never fails, never damages."""
    chance = random.Random(5)
    layout = LAYOUTS[name]
    with Store.open(path, max_bytes=CAP) as store, Watch(path) as watch:
        namespace = store.namespace(layout)
        written = n = 0
        kept: list[int] = []
        while written < 5 * CAP * SCALE:
            length = chance.choice([5, 60, 130, 300, 700])
            tokens = (
                session(n, length) if not kept or chance.random() < 0.7 else [*session(chance.choice(kept), 60), n, *range(length)]
            )
            result = save(namespace, tokens)
            written += max(result.written_bytes, 32768)
            kept = [*kept, n][-8:]
            n += 1
            assert restored(namespace, tokens) == len(tokens)  # the latest is never the victim
            stats = store.stats()
            assert stats.live_bytes <= stats.limit_bytes
        assert store.stats().counters.evicted_nodes > 10
        assert_sound(store)
    assert watch.samples > 20
    assert 0.5 * CAP < watch.most <= CAP


def test_mixed_size_classes_keep_the_cap(path: Path) -> None:
    """Namespaces of very different block sizes in one store evict each other's sessions and keep the cap."""
    chance = random.Random(6)
    with Store.open(path, max_bytes=CAP) as store, Watch(path) as watch:
        namespaces = [store.namespace(layout) for layout in (wide_layout(), plain_layout(), hybrid_layout())]
        for n in range(round(150 * SCALE)):
            namespace = chance.choice(namespaces)
            tokens = session(n, chance.choice([20, 100, 300]))
            save(namespace, tokens)
            assert restored(namespace, tokens) == len(tokens)
        assert store.stats().counters.evicted_nodes > 10
        assert_sound(store)
    assert watch.most <= CAP


def fill(namespace: Namespace, first: int, count: int) -> None:
    """Save sessions of one size."""
    for n in range(first, first + count):
        save(namespace, session(n))


def present(namespace: Namespace, count: int) -> list[int]:
    """Which of the sessions are stored whole."""
    found = {n: namespace.match(session(n)) for n in range(count)}
    return [n for n, match in found.items() if match is not None and match.length == 200]


def test_the_least_recently_used_goes_first(path: Path) -> None:
    """Sessions go in the order in which they were last used: a lease counts as a use, a match does not."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        fill(namespace, 0, 10)
        assert present(namespace, 10) == list(range(10))
        for n in (0, 3):
            assert_restores(namespace, session(n), 200)
        namespace.match(session(1))
        fill(namespace, 10, 7)
        left = present(namespace, 17)
        assert {0, 3} <= set(left)
        assert not {1, 2} & set(left)
        others = [n for n in left if n not in (0, 3)]
        assert others == list(range(others[0], 17))  # the rest in order of their saving
        assert_sound(store)


def test_a_trunk_in_use_outlives_its_branches(path: Path) -> None:
    """A beginning that prompts go on using stays when the sessions that branch off there go: it has had its own last use."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        trunk = session(0, 64)
        branches = [[*trunk, n, *range(1, 64)] for n in (500, 501)]
        for tokens in branches:
            save(namespace, tokens)
        fill(namespace, 1, 3)
        assert restored(namespace, [*trunk, 502]) == 64
        save(namespace, session(4))  # it carries the use into the store
        assert store.evict(free_bytes=10 * 64 * 4096).nodes > 2
        assert [restored(namespace, tokens) for tokens in branches] == [64, 64]
        assert 1 not in present(namespace, 5)
        assert_sound(store)


def test_recency_survives_a_reopening(path: Path) -> None:
    """What was used last before the store was closed is what is kept after it was opened again."""
    with Store.open(path, max_bytes=CAP) as store:
        fill(store.namespace(wide_layout()), 0, 10)
        assert_restores(store.namespace(wide_layout()), session(0), 200)
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        fill(namespace, 10, 7)
        left = present(namespace, 17)
        assert 0 in left
        assert 1 not in left


def test_a_long_conversation_loses_its_end_first(path: Path) -> None:
    """Eviction takes leaves: what is left of a session is a prefix of it, and shared beginnings outlive their branches."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        shared = list(range(9000, 9128))
        for n in range(26):
            save(namespace, [*shared, *session(n, 130)])
            assert_restores(namespace, [*shared, 99_999], 128)
        fill(namespace, 100, 3)
        matches = [namespace.match([*shared, *session(n, 130)]) for n in range(26)]
        lengths = [0 if m is None else m.length for m in matches]
        assert lengths[-1] == 258
        assert set(lengths) <= {128, 258}
        assert 128 in lengths
        assert_sound(store)


def test_a_saver_never_evicts_its_own_path(path: Path) -> None:
    """A session that grows until it fills the store is refused in the end, and keeps what was acknowledged."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        tokens: list[int] = []
        acknowledged = 0
        with pytest.raises(StoreFullError, match="cap") as caught:
            for _ in range(200):
                tokens += range(64)
                save(namespace, tokens, start=acknowledged // 64 * 64)
                acknowledged = len(tokens)
        assert isinstance(caught.value, OSError)
        assert acknowledged * 4096 > CAP / 2
        found = namespace.match(tokens)
        assert found is not None
        assert found.length >= acknowledged
        assert_restores(namespace, tokens[:acknowledged], acknowledged)
        assert_sound(store)
        namespace.evict()
        fill(namespace, 0, 5)


def test_a_session_larger_than_a_transaction_is_published_in_pieces(path: Path) -> None:
    """A save of many pieces comes back whole; one that is too large for the store leaves a valid, shorter prefix."""
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        whole = session(1, 2500)
        result = save(namespace, whole)
        assert result.new_blocks == 40
        assert_restores(namespace, whole, 2500)
        with pytest.raises(StoreFullError):
            save(namespace, session(2, 6000))
        left = restored(namespace, session(2, 6000))
        assert left % 64 == 0
        assert 0 < left < 6000
        assert_sound(store)


def test_states_are_evicted_with_what_they_are_for(path: Path) -> None:
    """With states, rows behind the last usable checkpoint go with it: nothing is left that nobody can restore."""
    layout = LAYOUTS["states"]
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        for n in range(30):
            base = session(n, 100)
            save(namespace, base)
            save(namespace, [*base, *range(100)])
        found = [namespace.match([*session(n, 100), *range(100)]) for n in range(30)]
        stored = [m for m in found if m is not None]
        assert 0 < len(stored) < 30
        assert all(m.length in (100, 200) for m in stored)
        assert all(m.length == m.stored_tokens for m in stored)
        assert store.stats().nodes == len(stored)
        assert session_states(layout, [1])["r"].size == 1 << 20
        assert_sound(store)


WRITER = """
store = Store.open(path)
namespace = store.namespace(wide_layout())
for n in range(40):
    tokens = [int(sys.argv[2]), n, *range(150)]
    save(namespace, tokens)
    with namespace.lease(tokens) as lease:
        if lease.length == 152:
            lease.validate()
print(store.stats().counters.evicted_nodes > 0)
"""


def test_the_cap_is_one_for_all_processes(path: Path) -> None:
    """Two processes that fill a store at once keep one cap between them."""
    with Store.open(path, max_bytes=CAP) as store:
        store.namespace(wide_layout())
        with Watch(path) as watch:
            children = [child(WRITER, path, str(n)) for n in range(2)]
            results = [process.communicate(timeout=120) for process in children]
        assert [process.returncode for process in children] == [0, 0], [err for _, err in results]
        assert [out.strip() for out, _ in results] == ["True", "True"]
        assert watch.most <= CAP
        assert_sound(store)
