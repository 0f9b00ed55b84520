"""A repair that is killed leaves the damaged store or the repaired one; running it again completes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import StoreDamagedError
from tests.repair.conftest import SESSIONS
from tests.repair.damage import repaired, zero
from tests.support import assert_restores, assert_sound, data_file, hybrid_layout, plain_layout, run_child, save

# dies at the n-th thing that a repair does to a directory; says how many there were if it lives
KILLED = """
seen = 0
def watch(event, args):
    global seen
    if event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir"):
        seen += 1
        if seen == int(sys.argv[2]):
            os._exit(9)
sys.addaudithook(watch)
done = Store.repair(path)
print(seen, flush=True)
"""


def test_killed_at_each_step(copy: Path, tmp_path: Path) -> None:
    """Whatever is done last before the end, the store's directory has one data file, and the next repair keeps everything."""
    zero(copy, 0, 2)
    raw = data_file(copy).read_bytes()
    outcomes = []
    at = 0
    while True:
        at += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        copy.mkdir(mode=0o700)
        data_file(copy).write_bytes(raw)
        for name in ("open.lock", "write.lock"):
            (copy / name).touch()
        try:
            run_child(KILLED, copy, str(at))
            break
        except AssertionError:
            pass
        assert data_file(copy).exists()
        try:
            Store.open(copy).close()
            outcomes.append("new")
        except StoreDamagedError:
            assert data_file(copy).read_bytes() == raw
            outcomes.append("old")
        Store.repair(copy)
        aside = [each for each in os.listdir(tmp_path) if each != copy.name]
        assert all(each.startswith("s.damaged-") for each in aside)
        assert len(aside) == 1
        assert (tmp_path / aside[0] / "data.mdb").read_bytes() == raw
        with Store.open(copy) as store:
            assert_sound(store)
            for tokens in SESSIONS[-2:]:
                assert_restores(store.namespace(plain_layout()), tokens, len(tokens))
    assert outcomes == sorted(outcomes, reverse=True)  # old ones first
    assert outcomes.count("old") > 2
    assert "new" in outcomes


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_it_writes(copy: Path, seed: int) -> None:
    """A repair in place that is killed at one of its transactions has lost nothing more than a whole one loses."""
    with Store.open(copy) as store:
        namespace = store.namespace(plain_layout(), salt=b"in place")
        for n in range(4):
            save(namespace, [n, *range(100)])
        with namespace.lease([1, *range(100)]) as lease:
            at = lease.blocks[1].file_offset
    with data_file(copy).open("r+b") as file:
        file.seek(at)
        file.write(bytes(64))
    code = """
    from kvstore.env import Environment
    begun, write = 0, Environment.write
    def dying(self, *args, **options):
        global begun
        begun += 1
        if begun > int(sys.argv[2]):
            os._exit(9)
        return write(self, *args, **options)
    Environment.write = dying
    Store.repair(path)
    """
    with pytest.raises(AssertionError):
        run_child(code, copy, str(seed))
    repaired(copy)
    with Store.open(copy) as store:
        namespace = store.namespace(plain_layout(), salt=b"in place")
        for n in range(4):
            assert_restores(namespace, [n, *range(100)], 16 if n == 1 else 101)
        assert_restores(store.namespace(hybrid_layout()), SESSIONS[3], len(SESSIONS[3]))
