"""Several processes on one store: at once, one after the other, and killed at any instant."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    child,
    child_at,
    hybrid_layout,
    plain_layout,
    restored,
    run_child,
    save,
    wide_layout,
)

LONG = [n * 7919 % 1000 for n in range(1500)]

SAVE_LONG = """
tokens = [n * 7919 % 1000 for n in range(1500)]
store = Store.open(path)
namespace = store.namespace(wide_layout())
rows = session_rows(wide_layout(), tokens, writer=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
result = namespace.save(tokens, rows)
print(result.tokens, result.new_blocks, flush=True)
"""


@pytest.mark.parametrize("turn", range(3))
def test_two_processes_that_save_the_same_session_share_one_copy(path: Path, turn: int) -> None:
    """Two processes that save the same long session at the same instant both succeed, and one copy is stored."""

    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        children = [child(SAVE_LONG, path, "0") for _ in range(2)]
        for process in children:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in children:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=120) for process in children]
        assert [process.returncode for process in children] == [0, 0], [err for _, err in results]
        assert [out.split()[0] for out, _ in results] == ["1500", "1500"]
        stats = store.stats()
        assert stats.payload_bytes == 1500 * 4096
        assert stats.blocks == sum(int(out.split()[1]) for out, _ in results) - _superseded(results) == 24
        assert_restores(namespace, LONG, 1500)
        assert_sound(store)


def _superseded(results: list[tuple[str, str]]) -> int:
    """Blocks that were written and replaced by longer ones: each process counts what it wrote."""
    return sum(int(out.split()[1]) for out, _ in results) - 24


def test_two_writers_of_other_bytes_end_with_whole_blocks_of_either(path: Path) -> None:
    """When two processes save other bytes for the same tokens at once, each block is one of the two, whole and checked."""
    from kvstore.testing import destination, session_rows

    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        children = [child(SAVE_LONG, path, str(n)) for n in range(2)]
        for process in children:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=120) for process in children]
        assert [process.returncode for process in children] == [0, 0], [err for _, err in results]
        into = destination(wide_layout(), 1500)["kv"]
        with namespace.lease(LONG) as lease:
            assert lease.length == 1500
            lease.copy_into({"kv": into})
        choices = [session_rows(wide_layout(), LONG, writer=n)["kv"] for n in range(2)]
        assert all(any(into[row].tobytes() == c[row].tobytes() for c in choices) for row in range(1500))
        assert_sound(store)


def test_what_one_process_saves_the_next_restores(path: Path) -> None:
    """A session saved by a process that ended is restored by another one, byte for byte, states too."""
    code = """
    with Store.open(path, max_bytes=CAP) as store:
        for layout in (plain_layout(), hybrid_layout()):
            save(store.namespace(layout, salt=b"s"), list(range(77)))
    """
    run_child(code, path)
    with Store.open(path) as store:
        for layout in (plain_layout(), hybrid_layout()):
            assert_restores(store.namespace(layout, salt=b"s"), list(range(90)), 77)


def test_threads_share_a_store(path: Path) -> None:
    """Threads that save, restore and evict in one process at once see whole sessions or none."""
    failures: list[BaseException] = []
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(hybrid_layout())

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(25):
                    tokens = [chance.randrange(4), *range(chance.choice([10, 40, 70]))]
                    save(namespace, tokens)
                    restored(namespace, [chance.randrange(4), *range(80)])
                    if chance.random() < 0.2:
                        namespace.evict(tokens)
            except BaseException as error:  # whatever it is, the test has to see it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert_sound(store)


def test_a_reader_in_another_process_keeps_its_bytes(path: Path) -> None:
    """A lease in one process keeps its bytes while another process evicts them and writes all it can."""
    from kvstore.errors import StoreFullError

    code = """
    store = Store.open(path)
    namespace = store.namespace(wide_layout())
    with namespace.lease(list(range(200))) as lease:
        views = lease.views("kv")
        print("leased", flush=True)
        sys.stdin.readline()
        lease.validate()
        assert np.concatenate(views).tobytes() == session_rows(wide_layout(), list(range(200)))["kv"].tobytes()
        print("same", flush=True)
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(200)))
        with child_at(code, path) as process:
            namespace.evict()
            with pytest.raises(StoreFullError):
                for n in range(100):
                    save(namespace, [n + 5, *range(200)])
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "same\n"
        for n in range(30):
            save(namespace, [n + 500, *range(200)])
        assert_sound(store)


def test_a_dead_reader_pins_nothing(path: Path) -> None:
    """The slot of a reader that was killed is cleared, so that what it pinned can be used again."""

    code = """
    store = Store.open(path)
    lease = store.namespace(wide_layout()).lease(list(range(200)))
    print("leased", flush=True)
    time.sleep(600)
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(200)))
        with child_at(code, path) as process:
            process.kill()
            process.wait()
            for n in range(60):
                save(namespace, [n + 5, *range(200)])
        assert not store.stats().readers_pinning
        assert_sound(store)
