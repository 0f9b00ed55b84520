"""Eight processes at once under a cap that forces eviction."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

from kvstore import Store
from tests.figures import Figures
from tests.support import SCALE, SEED, assert_sound, child

from .crowd import fill

CAP = 20 << 20
PROCESSES = 8
RUN = """
from tests.store.crowd import crowd
crowd(path, int(sys.argv[2]), SEED, float(sys.argv[3]))
"""


def on_disk(path: Path) -> int:
    """What a store's directory takes on disk now, itself included."""
    total = os.lstat(path).st_blocks
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue
    return total * 512


def test_eight_processes_under_a_tight_cap(tmp_path: Path, figures: Figures) -> None:
    """Half of them tiers, half callers of namespaces, two layouts, prefixes in common: nobody gets a wrong byte or an error,
    and the directory never takes more than the cap.
    """
    path, seconds = tmp_path / "s", max(3.0 * SCALE, 3.0)
    with Store.open(path, max_bytes=CAP) as store:
        fill(store)
    process = child(RUN, path, str(PROCESSES), str(seconds))
    guard = threading.Timer(seconds + 300, process.kill)
    guard.start()
    most = samples = 0
    while process.poll() is None:
        most = max(most, on_disk(path))
        samples += 1
        time.sleep(0.001)
    out, err = process.communicate()
    guard.cancel()
    assert process.returncode == 0, err
    counts: Counter[str] = Counter(json.loads(out))
    assert not [what for what in counts if what.startswith("error")], counts
    assert most <= CAP
    assert counts["sessions' ends evicted"]
    assert all(counts[what] for what in ("saves", "restores", "cascades"))
    assert counts["promotes"] + counts["promotes of nothing"]
    with Store.open(path) as store:
        assert_sound(store)
        live = store.stats().live_bytes
    did = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    figures.add(
        f"{PROCESSES} processes for {seconds:g} s (seed {SEED})",
        did,
        f"at most {most / CAP:.1%} of the cap on disk in {samples} samples, {live / CAP:.0%} live in the end",
        "0 wrong bytes, 0 errors",
    )
