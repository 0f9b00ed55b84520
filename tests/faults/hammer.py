"""Everything a store does, on several threads at once, while its file is cut off under it.

Run in a child process: a fault that is not handled ends it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvstore import Namespace, SessionTier, Store
from kvstore.errors import KVStoreError
from kvstore.testing import HashEngine
from tests.support import data_file, hybrid_layout, plain_layout, restored, save, wide_layout

CAP = 24 << 20
SESSIONS = 60
Work = Callable[[random.Random], object]


def prompt(number: int) -> list[int]:
    """Give the tokens of a session: the first half of them are those of five others."""
    return [number % 10, *range(40 + number % 7 * 16), number, *range(100, 130)]


def fill(path: Path) -> None:
    """Make a store with enough sessions for trees of several pages."""
    with Store.open(path, max_bytes=CAP) as store:
        for layout in (plain_layout(), hybrid_layout()):
            for number in range(SESSIONS):
                save(store.namespace(layout), prompt(number))
        for number in range(0, SESSIONS, 10):
            engine = HashEngine(plain_layout(), capacity=400)
            with SessionTier(store, engine, salt=b"tier") as tier:
                engine.feed(prompt(number))
                tier.cascade(prompt(number))


def works(store: Store, directory: Path) -> dict[str, Work]:
    """Name what is done to a store. Restoring checks every byte."""
    plain, hybrid, wide = (store.namespace(layout) for layout in (plain_layout(), hybrid_layout(), wide_layout()))

    def some(rng: random.Random) -> tuple[Namespace, list[int]]:
        return rng.choice([plain, hybrid]), prompt(rng.randrange(SESSIONS + 40))

    def match(rng: random.Random) -> object:
        namespace, tokens = some(rng)
        return namespace.match(tokens)

    def restore(rng: random.Random) -> object:
        return restored(*some(rng))

    def write(rng: random.Random) -> object:
        return save(*some(rng))

    def large(rng: random.Random) -> object:
        return save(wide, prompt(rng.randrange(SESSIONS)) * 2)  # blocks that are on their way before they are committed

    def tier(rng: random.Random) -> object:
        engine = HashEngine(plain_layout(), capacity=400)
        with SessionTier(store, engine, salt=b"tier") as tier:
            tokens = prompt(rng.randrange(SESSIONS + 40))
            reused = tier.promote(tokens)  # neither raises
            if reused:
                whole = HashEngine(plain_layout(), capacity=400)
                whole.feed(tokens[:reused])
                assert engine.state_hash() == whole.state_hash()
            engine.feed(tokens[reused:])
            tier.cascade(tokens)
        return None

    def again(_: random.Random) -> object:
        with Store.open(directory) as second:
            return second.stats()

    return {
        "match": match,
        "restore": restore,
        "save": write,
        "save large ones": large,
        "tier": tier,
        "evict": lambda rng: store.evict(free_bytes=rng.randrange(1 << 18)),
        "verify": lambda rng: store.verify(deep=rng.random() < 0.3),
        "stats": lambda _: (store.stats(), store.namespaces()),
        "open": again,
    }


def attempt(name: str, work: Work, rng: random.Random, outcomes: Counter[str]) -> None:
    """Do one thing and count what came of it."""
    try:
        work(rng)
        outcomes[f"{name} done"] += 1
    except KVStoreError as error:  # which promote and cascade don't raise
        outcomes[f"{name} {type(error).__name__}" if name != "tier" else f"tier unnamed {error!r}"] += 1
    except BaseException as error:
        outcomes[f"{name} unnamed {error!r}"] += 1


def cut_off(store: Store, directory: Path, rng: random.Random, outcomes: Counter[str]) -> None:
    """Work on a store on many threads, and cut its file off at any instant of what they do.

    Where one of the system's pages ends, and while nobody writes: what would be zeros otherwise is no fault that anybody is told of
    (docs/architecture.md), and is looked for in the tests beside this.
    """
    done = threading.Event()

    def run(name: str, work: Work, mine: random.Random) -> None:
        last = False
        while not last:
            last = done.is_set()  # once more when all is over
            attempt(name, work, mine, outcomes)

    threads = [
        threading.Thread(target=run, args=(name, work, random.Random(rng.random())))
        for name, work in works(store, directory).items()
    ]
    for thread in threads:
        thread.start()
    time.sleep(rng.random() * 0.1)
    file = data_file(directory)
    size = file.stat().st_size
    # anywhere, in the region of the trees, inside the first pages, or whole
    length = rng.choice([rng.randrange(size), rng.randrange(size >> 3), rng.randrange(65536), 0])
    with open(directory / "write.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.truncate(file, length // mmap.PAGESIZE * mmap.PAGESIZE)
    time.sleep(rng.random() * 0.05)
    done.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    filled, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    total: Counter[str] = Counter()
    for number in range(seed, seed + rounds):
        with tempfile.TemporaryDirectory(dir=filled.parent) as name:
            directory = Path(name) / "store"
            shutil.copytree(filled, directory)
            with Store.open(directory) as store:
                cut_off(store, directory, random.Random(number), total)
    for outcome, count in sorted(total.items()):
        print(count, outcome)
