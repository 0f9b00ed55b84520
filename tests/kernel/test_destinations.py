"""Destinations that a direct read can't fill, or that somebody writes to meanwhile: the block is not to blame."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.kernel import Rows, gather, restore

from .oracle import Payloads, Stream
from .test_restoring import Stored, aligned, stored

_MEMFD_SECRET = 447


def job(blocks: int = 3) -> tuple[Stream, Payloads, np.ndarray, np.ndarray, np.ndarray]:
    """Make blocks of 1 MiB whose rows lie as one run."""
    stream = Stream(np.random.default_rng(4).integers(0, 256, (blocks * 256, 4096), np.uint8), 0)
    first, count = np.arange(blocks) * 256, np.full(blocks, 256)
    payloads = Payloads([stream.rows()], count)
    return stream, payloads, first, count, gather([stream.rows()], payloads.addresses, first, count)


def test_memory_that_cannot_be_read_into(tmp_path: Path) -> None:
    """Where the system refuses to read straight into the destination, the bytes come by way of a buffer."""
    stream, payloads, first, count, sums = job()
    fd = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, 0)
    if fd < 0:
        pytest.skip("this system has no memory that it keeps from itself (memfd_secret)")
    os.ftruncate(fd, stream.array.nbytes)
    try:
        memory = mmap.mmap(fd, stream.array.nbytes)
        secret = np.frombuffer(memory, np.uint8).reshape(stream.array.shape)
        secret[...] = 0
    finally:
        os.close(fd)
    with stored(tmp_path, payloads) as file:
        file.drop()
        rows = [Rows.strided(secret, axis=0)]
        restored = restore(file.source(), rows, file.offsets, first, count, count, sums, direct=np.ones(3, np.uint8))
    assert restored is not None
    assert restored.sound
    assert (secret == stream.array).all()


def test_somebody_writes_to_the_destination(tmp_path: Path) -> None:
    """Who writes to a destination during a restore gets what he asked for, but no block is said to be wrong."""
    stream, payloads, first, count, sums = job(8)
    into = aligned(stream.array)
    over = False

    def scribble() -> None:
        while not over:
            into[::16, 0] += 1

    with stored(tmp_path, payloads) as file:
        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(20):
                assert sound_after_drop(file, into, first, count, sums)
        finally:
            over = True
            thread.join()


def sound_after_drop(file: Stored, into: np.ndarray, first: np.ndarray, count: np.ndarray, sums: np.ndarray) -> bool:
    """Restore everything cold; say whether every block passed."""
    file.drop()
    rows = [Rows.strided(into, axis=0)]
    restored = restore(file.source(), rows, file.offsets, first, count, count, sums, direct=np.ones(first.size, np.uint8))
    assert restored is not None
    return restored.sound
