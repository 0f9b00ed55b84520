"""A disk that is full, or fails, at any write: a named error or a counted miss, nothing torn, all space back, and on it goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.figures import Figures
from tests.support import ROOT, SCALE, SEED, run_child

TRY_ALL = """
from pathlib import Path
from tests.faults.full import try_all
try_all(Path(path), SEED)
"""


def test_every_write_of_a_save_in_turn(
    quick_path: Path, bad_writes: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    """Saves and cascades of every kind, each of whose writes and waits fails in turn (no room, half of it, EIO; once, or from then
    on): what was acknowledged is there, what takes space is what there was or a valid prefix, and with room the save succeeds.
    """
    monkeypatch.setenv("LD_PRELOAD", os.fspath(bad_writes))
    counts: Counter[str] = Counter(json.loads(run_child(TRY_ALL, quick_path, timeout=1800.0).splitlines()[-1]))
    named = {name: counts[name] for name in ("StoreFullError", "DiskError", "StoreDamagedError", "miss", "stored")}
    assert sum(named.values()) == counts["trials"]
    assert counts["trials"] == counts["all"] or SCALE < 20
    assert counts["StoreFullError"] and counts["DiskError"] and counts["miss"]
    outcomes = ", ".join(f"{name} {count}" for name, count in named.items() if count)
    reopened = sum(count for name, count in counts.items() if name.startswith("reopened"))
    figures.add(
        f"disk full or failing (seed {SEED})",
        f"{counts['trials']} of {counts['all']} writes of saves failed in turn ({outcomes})",
        f"0 torn, all space back, {reopened} times by opening the store again",
    )


SERVER = """
import ctypes
from tests.faults.full import *
from tests.faults.full import HYBRID
turns, tokens, misses = [], [], []
with Store.open(path, max_bytes=CAP) as store:
    server = engine(HYBRID, [9])
    with SessionTier(store, server) as tier:
        for turn in range(12):
            prompt = [*tokens, *range(turn, turn + 20)]
            server.scribble()
            turns.append(tier.promote(prompt))
            server.feed(prompt[turns[-1]:])
            assert server.state_hash() == engine(HYBRID, prompt).state_hash()
            if 4 <= turn < 8:
                arm(1)  # the disk is full in these turns
            tier.cascade(prompt)
            tier.flush()
            arm()
            misses.append(tier.stats.save_misses)
            tokens = prompt
    assert_sound(store)
print(misses)
print(turns)
"""


def test_a_server_lives_through_a_full_disk(tmp_path: Path, bad_writes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose disk is full for some turns counts a miss each, answers right all along, and saves again once it isn't."""
    monkeypatch.setenv("LD_PRELOAD", os.fspath(bad_writes))
    misses, turns = (json.loads(line) for line in run_child(SERVER, tmp_path / "s").splitlines())
    assert misses == [0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert turns == [0, 20, 40, 60, 80, 80, 80, 80, 80, 180, 200, 220]


# Run inside a mount namespace of its own: nothing of it is seen outside, and it goes with the process.
SMALL_DISK = """
import os, shutil, subprocess, sys
from pathlib import Path
from kvstore import *
from kvstore.errors import StoreFullError
from kvstore.testing import *
from tests.support import *
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", disk], check=True)
with Store.open(disk / "s", max_bytes=CAP) as store:
    wide, hybrid = store.namespace(wide_layout()), store.namespace(hybrid_layout())
    save(wide, [1, *range(300)])
    save(hybrid, [1, *range(50)])
    refused = acknowledged = 0
    for left in (5 << 20, 3 << 20, 700 << 10, 40 << 10, 0):
        with (disk / "other").open("wb") as other:  # somebody else fills the disk up to this
            space = os.statvfs(disk)
            other.write(bytes(max(space.f_bavail * space.f_frsize - left, 0)))
        for turn in range(12):
            sessions = [(wide, [2, left, turn, *range(150)]), (hybrid, [2, left, turn, *range(40)]), (wide, [3, left, *range(700)])]
            namespace, tokens = sessions[turn % 3]
            before = store.stats()
            try:
                save(namespace, tokens)
            except StoreFullError as error:
                assert "full" in str(error) or "room" in str(error), error
                refused += 1
            else:
                acknowledged += 1
                assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)
        with SessionTier(store, HashEngine(hybrid_layout())) as tier:
            tier._engine.feed(range(left % 1000 + 5, left % 1000 + 45))
            tier.cascade(range(left % 1000 + 5, left % 1000 + 45))
            tier.flush()
            assert tier.stats.saved + tier.stats.save_misses == 1
        (disk / "other").unlink()
        for _ in range(3):  # and with room again all is well, in the same process
            save(wide, [5, left, *range(200)])
            assert_restores(wide, [5, left, *range(200)], 202)
        assert_sound(store)
with Store.open(disk / "s") as store:
    assert_sound(store)
print(refused, acknowledged)
"""


def test_a_small_file_system(tmp_path: Path, figures: Figures) -> None:
    """On a real file system that others fill up, saves are refused by name, nothing is torn, and with room again all goes on."""
    unshare = shutil.which("unshare")
    alone = [unshare or "unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if unshare is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespaces")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [*alone, sys.executable, "-c", SMALL_DISK, os.fspath(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    refused, acknowledged = map(int, done.stdout.split())
    assert refused > 5
    assert acknowledged > 5
    figures.add("disk full, a file system of 24 MiB", f"{refused} saves refused by name", f"{acknowledged} acknowledged", "0 torn")
