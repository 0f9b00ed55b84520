"""kill -9 at any instant: of savers, servers, readers, and who holds the write lock or a lease."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.records.node import Node
from tests.env.parts import parts_of
from tests.figures import Figures
from tests.support import CAP, SEED, assert_restores, assert_sound, child, child_at, data_file, save, twentieth

from .killed import LAYOUTS, ROLES, check, session

ROOMY, TIGHT = 96 << 20, 12 << 20
ROUNDS_A_STORE = 2
SAID = {"saved", "refused", "served", "read", "locked", "leased"}

# Forks the children, which so begin with everything imported and nothing opened; kills them and says how they ended.
NURSERY = """
import ctypes
from tests.store.killed import run
for line in sys.stdin:
    what, *words = line.split()
    if what == "start":
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody outlives a test that failed
            log = os.open(words[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            run(path, words[1], int(words[2]), int(words[3]))
            os._exit(0)
        print(pid, flush=True)
    else:
        os.kill(int(words[0]), signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(int(words[0]), 0)[1]), flush=True)
"""


class Nursery:
    """Starts and kills the children of one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = child(NURSERY, path)

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._process.communicate()[1]
        return int(answer)

    def round(self, logs: Path, cap: int, number: int, chance: random.Random) -> list[list[str]]:
        """Start one child of each role and kill each at an instant of its own, from before it opens the store on.

        Returns what each had said by then, in whole lines.
        """
        started = time.monotonic()
        children = []
        for place, role in enumerate(ROLES):
            log = logs / f"{number} {place} {role}".replace(" ", "-")
            pid = self._ask("start", log, role, cap, 10 * number + place)
            children.append((chance.uniform(0, 0.04) if chance.random() < 0.2 else chance.uniform(0, 0.8), pid, log))
        said = []
        for after, pid, log in sorted(children):
            time.sleep(max(started + after - time.monotonic(), 0))  # which instant it is, is left to chance
            ended = self._ask("end", pid)
            text = log.read_text() if log.exists() else ""
            assert ended == -9, (log.name, ended, text[-3000:])
            said.append([line for line in text.splitlines(keepends=True) if line.endswith("\n")])
        return said

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        """End it; by then it has no children, but where the test fails."""
        self._process.kill()
        self._process.communicate()


def assert_accounted(store: Store) -> None:
    """Require that every page of the file is in use or free, and that LMDB's counters say the same as a walk over the trees."""
    parts = parts_of(data_file(store.path))
    with store._scope.environment.reading() as txn:
        live = txn.live_pages()
    assert parts.live_pages == live
    assert parts.lost_pages == 0
    assert set(os.listdir(store.path)) == {"data.mdb", "lock.mdb", "open.lock", "write.lock"}


def half_written(store: Store) -> int:
    """How many checkpoints there are that no saver has completed."""
    with store._scope.environment.reading() as txn:
        nodes = [Node.decode(int.from_bytes(key, "big"), raw) for key, raw in txn.items(txn.db.nodes)]
    return sum(not checkpoint.complete for node in nodes for checkpoint in node.checkpoints)


@dataclass
class Tally:
    """What all rounds came to."""

    said: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    rounds: int = 0
    acknowledged: int = 0
    compared: int = 0


def use_a_store(nursery: Nursery, home: Path, cap: int, number: int, chance: random.Random, tally: Tally, *, tight: bool) -> None:
    """Some rounds on a store of its own, which is looked over after each and emptied in the end."""
    held: dict[tuple[int, int, int], int] = {}  # (layout, session, branch): its longest acknowledged length
    for turn in range(ROUNDS_A_STORE):
        for lines in nursery.round(home, cap, number + turn, chance):
            tally.kills += 1
            for words in map(str.split, lines):
                assert words[0] in SAID, "".join(lines)  # somebody was about to end by himself
                tally.said[words[0]] += 1
                if words[0] == "saved":
                    which, session_number, length, branch = map(int, words[1:])
                    key = (which, session_number, branch)
                    held[key] = max(held.get(key, 0), length)
                    tally.acknowledged += 1
        tally.rounds += 1
        with Store.open(nursery.path, max_bytes=cap) as store:
            assert_sound(store)
            namespaces = [store.namespace(layout) for layout in LAYOUTS]
            for (which, session_number, branch), length in held.items():
                found = check(which, namespaces[which], session(session_number, length, branch))
                assert tight or found == length, (which, session_number, branch, found, length)
                tally.compared += 1
            save(namespaces[1], [7, turn, 7])  # the next writer
            assert_restores(namespaces[1], [7, turn, 7], 3)
            assert_sound(store)
            assert_accounted(store)
            assert not half_written(store)
    with Store.open(nursery.path) as store:
        for info in store.namespaces():
            store.evict_namespace(bytes.fromhex(info.namespace_id))
        stats = store.stats()
        assert (stats.blocks, stats.nodes, stats.payload_bytes) == (0, 0, 0)
        assert_sound(store)
        assert_accounted(store)


def test_killed_at_any_instant(tmp_path: Path, figures: Figures) -> None:
    """After each round everything verifies deeply, what was acknowledged last is there whole (where nothing had to be evicted for
    it), nobody read a wrong byte, and once somebody writes again every page and every block is accounted for.
    """
    chance, wanted = random.Random(SEED), twentieth(300)
    tally = Tally()
    for generation in itertools.count():
        tight = generation % 2 == 1
        with Nursery(tmp_path / str(generation)) as nursery:
            use_a_store(nursery, tmp_path, TIGHT if tight else ROOMY, 10 * generation, chance, tally, tight=tight)
        if tally.kills >= wanted and tally.acknowledged:
            break
    did = ", ".join(f"{word} {count}" for word, count in sorted(tally.said.items()))
    saves = f"{tally.acknowledged} saves acknowledged, {tally.compared} times compared"
    figures.add(
        f"kill -9 (seed {SEED})",
        f"{tally.kills} kills in {tally.rounds} rounds ({did})",
        f"{saves}, 0 torn, 0 lost, 0 orphaned bytes after the next writer, 0 half-written checkpoints left",
    )


HOLDER = """
store = Store.open(path)
environment = store._scope.environment
with environment.write(5.0) as txn:
    for n in range(200):
        txn.put(txn.db.meta, b"held %d" % n, bytes(9000))
    print("holding", flush=True)
    time.sleep(600)
"""

LEASE = """
store = Store.open(path)
lease = store.namespace(hybrid_layout()).lease(list(range(50)))
views = lease.views("k")
print("leased", len(views), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("code", [HOLDER, LEASE], ids=["the write lock", "a lease"])
def test_a_holder_is_killed(tmp_path: Path, code: str) -> None:
    """Who holds the write lock in the middle of a transaction, or a lease, dies: others write at once, and nothing of it stays."""
    path = tmp_path / "s"
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(LAYOUTS[1])
        save(namespace, list(range(50)))
        before = store.stats()
        with child_at(code, path) as process:
            process.kill()
            process.wait()
            for n in range(3):
                save(namespace, [n + 5, *range(40)])
                assert_restores(namespace, [n + 5, *range(40)], 41)
        for n in range(3):
            namespace.evict([n + 5, *range(40)])
        after = store.stats()
        assert (after.blocks, after.nodes, after.payload_bytes) == (before.blocks, before.nodes, before.payload_bytes)
        assert_restores(namespace, list(range(50)), 50)
        assert_sound(store)
        assert_accounted(store)
