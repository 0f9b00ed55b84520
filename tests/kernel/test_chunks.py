"""Restoring chunk by chunk: the same bytes as a restore of the whole, a few buffers at a time."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.kernel import Rows, Target, gather, progress_end, progress_set, progress_wait, restore_chunks
from tests.support import examples

from .oracle import Payloads
from .test_restoring import Stored, stored

BLOCK, STREAMS = 8, 3


class Taker:
    """A file of blocks, buffers to restore them into, and a thread that does."""

    def __init__(self, path: Path, sizes: list[int], buffers: int) -> None:
        self.sizes = sizes
        blocks = sum(sizes)
        rng = np.random.default_rng(blocks)
        self.arrays = [rng.integers(0, 256, (blocks * BLOCK, 30 + 7 * s), np.uint8) for s in range(STREAMS)]
        rows = [Rows.strided(array, axis=0) for array in self.arrays]
        self.tokens = np.full(blocks, BLOCK, np.int64)
        payloads = Payloads(rows, self.tokens)
        self.sums = gather(rows, payloads.addresses, np.arange(blocks) * BLOCK, self.tokens)
        self.path, self.payloads = path, payloads
        longest = max(sizes) * BLOCK
        self.buffers = [[np.zeros((longest, array.shape[1]), np.uint8) for array in self.arrays] for _ in range(buffers)]
        self.first = np.concatenate([np.arange(size, dtype=np.int64) * BLOCK for size in sizes])
        self.filled, self.taken = np.zeros(len(sizes), np.int32), np.zeros(len(sizes), np.int32)
        self.stop = np.zeros(1, np.int32)
        self.got: Any = None

    def restore(self, file: Stored, **changes: Any) -> Any:
        """Restore, on the calling thread."""
        given: dict[str, Any] = {
            "targets": [[Rows.strided(array, axis=0) for array in buffer] for buffer in self.buffers],
            "which": np.arange(len(self.sizes), dtype=np.uint32) % len(self.buffers),
            "ends": np.cumsum(self.sizes).astype(np.uint64),
            "payloads": file.offsets,
            "first": self.first,
            "tokens": self.tokens,
            "used": self.tokens,
            "sums": self.sums,
            "direct": np.zeros(len(self.tokens), np.uint8),
            "filled": self.filled,
            "taken": self.taken,
            "ahead": len(self.buffers) - 1,
            "stop": self.stop,
            **changes,
        }
        given["targets"] = [Target.of(rows) for rows in given["targets"]]
        return restore_chunks(file.source(), **given)

    def start(self, file: Stored, **changes: Any) -> threading.Thread:
        """Restore on a thread."""

        def run() -> None:
            self.got = self.restore(file, **changes)
            progress_end(self.filled)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def check(self, chunk: int) -> None:
        """Require a chunk's rows in its buffer."""
        start = sum(self.sizes[:chunk]) * BLOCK
        count = self.sizes[chunk] * BLOCK
        for array, target in zip(self.arrays, self.buffers[chunk % len(self.buffers)], strict=True):
            assert target[:count].tobytes() == array[start : start + count].tobytes()


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    buffers=st.integers(1, 3),
    cold=st.sampled_from(["cached", "through", "past"]),
    used=st.integers(0, BLOCK),
)
@settings(max_examples=examples(60))
def test_as_a_whole(tmp_path_factory: Any, sizes: list[int], buffers: int, cold: str, used: int) -> None:
    """Each chunk is in its buffer when it is said to be, from wherever it comes, and stays until it is taken; of the last block
    only what is used is copied.
    """
    taker = Taker(tmp_path_factory.mktemp("chunks"), sizes, buffers)
    some = taker.tokens.copy()
    some[-1] = used
    with stored(taker.path, taker.payloads) as file:
        if cold != "cached":
            file.drop()
        thread = taker.start(file, used=some, direct=np.full(len(some), cold == "past", np.uint8))
        for chunk in range(len(sizes)):
            assert progress_wait(taker.filled, chunk, 60) == 1
            if chunk < len(sizes) - 1:
                taker.check(chunk)
            else:
                rest = (sizes[chunk] - 1) * BLOCK + used
                for array, target in zip(taker.arrays, taker.buffers[chunk % buffers], strict=True):
                    assert target[:rest].tobytes() == array[sum(sizes[:chunk]) * BLOCK :][:rest].tobytes()
            progress_set(taker.taken, chunk, 1)
        thread.join()
    assert taker.got.sound


def test_damage(tmp_path: Path) -> None:
    """A chunk with a wrong byte isn't handed out, and its stream is named; those before it are right, none behind it is begun."""
    taker = Taker(tmp_path, [1, 2, 1, 1], 1)
    with stored(tmp_path, taker.payloads) as file:
        with open(file.path, "r+b") as raw:
            raw.seek(int(file.offsets[2]) + BLOCK * 30 + 64)  # the third block, its second stream
            byte = raw.read(1)[0]
            raw.seek(-1, 1)
            raw.write(bytes([byte ^ 1]))
        thread = taker.start(file)
        assert progress_wait(taker.filled, 0, 60) == 1
        taker.check(0)
        progress_set(taker.taken, 0, 1)
        assert progress_wait(taker.filled, 1, 60) == -1
        thread.join(60)
        assert taker.got.failed.tolist() == [-1, -1, 1, -1, -1]
        assert taker.filled.tolist() == [1, -1, -1, -1]
        assert not taker.got.errors.any()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_damage_on_the_disk(tmp_path: Path, ahead: int, bad: int) -> None:
    """Where chunks come from the disk, two at once, a bad one ends it by itself, also where the next waits for a buffer that
    whoever has met the bad one never gives back. What comes before it is right.
    """
    taker = Taker(tmp_path, [1] * 6, ahead + 1)
    with stored(tmp_path, taker.payloads) as file:
        with open(file.path, "r+b") as raw:
            raw.seek(int(file.offsets[bad]))
            byte = raw.read(1)[0]
            raw.seek(-1, 1)
            raw.write(bytes([byte ^ 1]))
            os.fsync(raw.fileno())
        file.drop()
        thread = taker.start(file, direct=np.ones(6, np.uint8))
        for chunk in range(bad):
            assert progress_wait(taker.filled, chunk, 60) == 1
            taker.check(chunk)
            progress_set(taker.taken, chunk, 1)
        assert progress_wait(taker.filled, bad, 60) == -1
        thread.join(60)
        assert not thread.is_alive()
        assert np.flatnonzero(taker.got.failed >= 0).tolist() == [bad]
        assert taker.got.failed[bad] == 0


def test_as_far_ahead_as_can_be(tmp_path: Path) -> None:
    """Who has a buffer for each chunk needs give none back."""
    taker = Taker(tmp_path, [1, 1, 2], 3)
    with stored(tmp_path, taker.payloads) as file:
        assert taker.restore(file, ahead=sys.maxsize).sound
    assert taker.filled.tolist() == [1, 1, 1]


def test_stopped(tmp_path: Path) -> None:
    """Who stops it gets nothing more: also where it waits for a chunk to be taken."""
    taker = Taker(tmp_path, [1, 1, 1], 1)
    with stored(tmp_path, taker.payloads) as file:
        thread = taker.start(file)
        assert progress_wait(taker.filled, 0, 60) == 1
        taker.stop[0] = 1
        progress_end(taker.taken)
        thread.join()
    assert taker.got is None
    assert taker.filled.tolist() == [1, -1, -1]


def _readonly(buffers: list[list[NDArray[Any]]]) -> list[list[Rows]]:
    array = buffers[0][0].copy()
    array.flags.writeable = False
    return [[Rows.strided(array, axis=0), *(Rows.strided(other, axis=0) for other in buffers[0][1:])]]


def test_refusals(tmp_path: Path) -> None:
    """Chunks that are none, don't fit, or would be written over one another are refused before a byte moves."""
    taker = Taker(tmp_path, [1, 2, 1], 2)
    ok = [[Rows.strided(array, axis=0) for array in buffer] for buffer in taker.buffers]
    small = [Rows.strided(array[: BLOCK * 2 - 1], axis=0) for array in taker.buffers[1]]
    mixed = [ok[0][0], *ok[1][1:]]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"targets": []}, "need a destination"),
        ({"targets": [ok[0], ok[1][:2]]}, "other streams"),
        ({"targets": [ok[0], small]}, "beyond the 15 rows"),
        ({"targets": [ok[0], mixed]}, "overlap"),
        ({"targets": _readonly(taker.buffers), "which": np.zeros(3, np.uint32), "ahead": 0}, "read-only"),
        ({"which": np.zeros(3, np.uint32)}, "may still hold"),
        ({"which": np.array([0, 1, 2], np.uint32)}, "2 destinations"),
        ({"which": np.zeros(2, np.uint32), "ends": np.array([1, 3], np.uint64)}, "filled"),
        ({"ends": np.array([1, 1, 4], np.uint64)}, "must ascend"),
        ({"ends": np.array([1, 2, 3], np.uint64)}, "must ascend"),
        ({"ahead": -1}, "ahead is -1"),
        ({"used": taker.tokens + 1}, "more than the"),
        ({"first": np.array([0, BLOCK, 0, 0], np.int64)}, "overlap or don't ascend"),
        ({"taken": np.zeros(2, np.int32)}, "taken must be"),
        ({"payloads": np.full(4, 1 << 40, np.uint64)}, "beyond"),
    ]
    with stored(tmp_path, taker.payloads) as file:
        for changes, match in cases:
            with pytest.raises(ValueError, match=match):
                taker.restore(file, **changes)
    assert not any(array.any() for buffer in taker.buffers for array in buffer)
    assert not taker.filled.any()


def test_targets_are_looked_at_with_each_call(tmp_path: Path) -> None:
    """What was worked out of a target serves many calls, and an array that may not be written any more is refused all the same."""
    taker = Taker(tmp_path, [1, 2, 1], 3)
    targets = [Target([Rows.strided(array, axis=0) for array in buffer]) for buffer in taker.buffers]
    with stored(tmp_path, taker.payloads) as file:
        for _ in range(2):
            taker.filled[:] = 0
            for buffer in taker.buffers:
                for array in buffer:
                    array[...] = 0
            assert taker.restore(file, targets=targets).sound
            for chunk in range(3):
                taker.check(chunk)
        taker.buffers[2][1].flags.writeable = False
        taker.filled[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            taker.restore(file, targets=targets)
    assert not taker.filled.any()
