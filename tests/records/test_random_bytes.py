"""Whoever reads bytes from a disk or an engine gives a value or a named error, whatever the bytes are."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.figures import Figures
from tests.support import SEED, run_child, twentieth

from .feeding import TARGETS

FEED = """
import json
from tests.records.feeding import *
bound_memory(64 << 20)
print(json.dumps(feed(SEED, int(path))))
"""

FEED_LENGTHS = """
import json
from tests.records.feeding import *
bound_memory(64 << 20)
print(json.dumps(feed_lengths()))
"""


def test_random_and_mutated_bytes(figures: Figures) -> None:
    """Random bytes and mutated records, their checksums made right again or not, end in a value or a named error."""
    count = twentieth(100_000)
    ends: Counter[str] = Counter(json.loads(run_child(FEED, str(count)).splitlines()[-1]))
    assert ends.total() == count
    assert ends["a value"] < count // 2
    named = ", ".join(f"{name} {ends[name]}" for name in sorted(ends))
    figures.add(
        f"random and mutated bytes (seed {SEED})", f"{count} inputs to {len(TARGETS)} readers", f"only named errors ({named})"
    )


def test_no_memory_is_taken_from_an_unchecked_length(figures: Figures) -> None:
    """With a huge number at every place of every record, whatever is a length there, 64 MiB of memory are enough to refuse it."""
    ends: Counter[str] = Counter(json.loads(run_child(FEED_LENGTHS, "")))
    figures.add("huge lengths", f"{ends.total()} inputs in 64 MiB", "only named errors")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_fed_is_read_when_it_is_whole(name: str) -> None:
    """Each reader takes the bytes that the others' mutations start from."""
    decode, raw = TARGETS[name]
    assert decode(raw) is not None
