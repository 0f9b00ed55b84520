"""Random damage all over the file: a repair always ends with a sound store, and nothing wrong is ever restored from it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from kvstore import Store
from tests.repair.damage import PAGE, write_at
from tests.support import CAP, SCALE, data_file, hybrid_layout, plain_layout, run_child, save

WRITERS = (0, 1, 2)
LAYOUTS = (plain_layout(), hybrid_layout())
SESSIONS = [[n % 3, *range(n % 5 * 9), n % 2, *range(20 + 7 * n)] for n in range(12)]

RUN = """
from pathlib import Path
import shutil
from tests.repair.test_random import damage, examine
for seed in range(int(sys.argv[3]), int(sys.argv[4])):
    print(seed, flush=True)
    copy = Path(sys.argv[2]) / str(seed)
    shutil.copytree(path, copy / "s")
    damage(copy / "s", seed)
    print(examine(copy / "s"), flush=True)
    shutil.rmtree(copy)
"""


def make(path: Path) -> None:
    """Make a store with a past: sessions of three writers, evicted and saved anew, grown and branched."""
    chance = random.Random(1)
    with Store.open(path, max_bytes=CAP) as store:
        for writer in WRITERS:
            for layout in LAYOUTS:
                namespace = store.namespace(layout)
                for tokens in chance.sample(SESSIONS, 9):
                    save(namespace, tokens[: chance.randrange(5, len(tokens) + 1)], writer=writer)
                    save(namespace, tokens, writer=writer)
                for tokens in chance.sample(SESSIONS, 4):
                    namespace.evict(tokens)


def damage(path: Path, seed: int) -> None:
    """Flip bytes, lose sectors and pages, cut the end off: a few of them."""
    chance = random.Random(seed)
    size = data_file(path).stat().st_size
    pages = size // PAGE
    for _ in range(chance.choice([1, 1, 2, 5])):
        page = chance.choice([0, 1, chance.randrange(pages), chance.randrange(pages)])
        within = chance.choice([chance.randrange(160), PAGE - 1 - chance.randrange(4096), chance.randrange(PAGE)])
        kind = chance.randrange(5)
        if kind == 0:
            write_at(path, page * PAGE, bytes(PAGE))
        elif kind == 1:
            write_at(path, page * PAGE + within // 512 * 512, bytes(512))
        else:
            at = page * PAGE + within
            with data_file(path).open("r+b") as file:
                file.seek(at)
                old = file.read(1)[0]
            write_at(path, at, bytes([old ^ 1 << chance.randrange(8)]))
    if chance.random() < 0.1:
        with data_file(path).open("r+b") as file:
            file.truncate(chance.randrange(size))


def examine(path: Path) -> str:
    """Repair a store and try everything with it; say how much of it was kept."""
    from tests.repair.damage import repaired, restored_after_all  # the child imports this module by itself

    with_cap = repaired(path, max_bytes=CAP)
    with Store.open(path) as store:
        for layout in LAYOUTS:
            namespace = store.namespace(layout)
            for tokens in SESSIONS:
                restored_after_all(namespace, tokens, WRITERS)
            save(namespace, SESSIONS[0], writer=2)
            restored_after_all(namespace, SESSIONS[0], WRITERS)
        assert store.verify(deep=True).ok
    return str(with_cap)


def test_random_damage(tmp_path: Path) -> None:
    """Each of these ends in a store that verifies to the last byte; most of them lose little."""
    make(tmp_path / "whole")
    count, step = round(16 * SCALE), 60
    printed: list[str] = []
    for first in range(0, count, step):
        (tmp_path / "copies").mkdir()
        printed += run_child(RUN, tmp_path / "whole", tmp_path / "copies", str(first), str(min(first + step, count))).split()
        shutil.rmtree(tmp_path / "copies")
    assert printed[::2] == [str(seed) for seed in range(count)]
    kept = [int(tokens) for tokens in printed[1::2]]
    print(f"\nrepaired after random damage: seeds 0 to {count - 1}, tokens kept of {max(kept)}: {sorted(kept)}")
    assert sum(tokens > 0.9 * max(kept) for tokens in kept) > count / 2
