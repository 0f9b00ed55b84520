"""The pool: many callers at once, and forks."""

import os
import signal
import threading

import numpy as np
import pytest

from kvstore.kernel import Rows, crc32c, default_threads, gather, scatter

from .oracle import Payloads


def copy_there_and_back(seed: int, threads: int) -> bool:
    """Gather and scatter a few MB; return whether they came back."""
    source = np.random.default_rng(seed).integers(0, 256, (2048, 1024), np.uint8)
    target = np.zeros_like(source)
    rows = [Rows.strided(source, axis=0)]
    first, tokens = np.arange(8) * 256, np.full(8, 256)
    payloads = Payloads(rows, tokens)
    sums = gather(rows, payloads.addresses, first, tokens, threads=threads)
    back = [Rows.strided(target, axis=0)]
    failed = scatter(back, payloads.addresses, first, tokens, tokens, sums, threads=threads)
    whole = sums[0, 0] == crc32c(source[:256])
    return bool(whole and (failed == -1).all() and (source == target).all())


def test_many_callers() -> None:
    """Calls from many threads at once, each with helpers of its own, don't disturb one another."""
    results: list[bool] = []
    callers = [
        threading.Thread(target=lambda s=seed: results.extend(copy_there_and_back(s, 1 + s % 5) for _ in range(4)))
        for seed in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 32


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork() -> None:
    """A child that forks while the pool is at work gets a pool of its own, and the parent keeps its one."""
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            copy_there_and_back(1, 3)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for seed in range(5):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    signal.alarm(20)
                    status = 0 if copy_there_and_back(seed, 4) else 2
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert copy_there_and_back(seed, 4)
    finally:
        stop.set()
        busy.join()


def test_default_threads() -> None:
    """A copy uses no more threads than the process may have, and at most 8."""
    assert default_threads() == min(8, len(os.sched_getaffinity(0)))
