"""Bits that flip and sectors of zeros, in every part of the file: never a crash, other bytes, or an error without a name."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from tests.figures import Figures
from tests.support import SEED, child, data_file, twentieth

from .flips import make
from .parts import parts_of

TRY = """
from pathlib import Path
from tests.env.flips import try_from
try_from(Path(path), Path(sys.argv[2]), SEED, int(sys.argv[3]), int(sys.argv[4]))
"""


def test_damage_anywhere(tmp_path: Path, figures: Figures) -> None:
    """A store with damage in any of its parts is opened, matched, restored, verified, promoted from, saved into and emptied in a
    child: what can't be done has a name, what is handed back is right, and the child lives.
    """
    whole, count = tmp_path / "whole", twentieth(1200)
    make(whole)
    kinds = parts_of(data_file(whole)).runs
    assert {"meta", "free", "payload", "header of a block", "leaf of the free list", "leaf of nodes", "branch of refs"} <= set(
        kinds
    )
    ends: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    deaths: list[str] = []
    first = 0
    while first < count:
        process = child(TRY, whole, tmp_path, str(first), str(count))
        guard = threading.Timer(300 + count, process.kill)
        guard.start()
        assert process.stdout is not None
        tried = ""
        for line in process.stdout:
            if "\t" in line:
                tried = line.strip()
                first = int(tried.split("\t")[0]) + 1
                parts[tried.split("\t")[1]] += 1
            else:
                ends[line.strip()] += 1
        err = process.communicate()[1]
        guard.cancel()
        if process.returncode:
            deaths.append(f"{tried!r}: exit {process.returncode}, {err[-2000:]}")
            assert tried, deaths
    assert not deaths, (len(deaths), deaths[:3])
    assert ends.total() == count
    assert ends["all"] > count // 4  # payloads and what is free: the store goes on
    assert ends["open"]
    by_part = ", ".join(f"{part} {number}" for part, number in sorted(parts.items()))
    by_end = ", ".join(f"{end} {number}" for end, number in sorted(ends.items()))
    figures.add(
        f"flipped bits, zeroed sectors (seed {SEED})",
        f"{count} ({by_part})",
        f"got as far as: {by_end}",
        "0 crashes, 0 wrong bytes",
    )
