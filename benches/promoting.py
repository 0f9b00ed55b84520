"""A process that promotes sessions, and cascades others: `python -m benches.promoting`, asked by `benches.children.Worker`."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benches.engine import ArrayEngine
from benches.serving import serve
from benches.sessions import Array, large_layout, random_tokens
from kvstore import SessionTier, Store

__all__ = ["digest_of", "main"]

_THREADS = 2
_READ = 1 << 20


def digest_of(arrays: dict[str, Array], tokens: int) -> str:
    """A hash over the first rows of all arrays."""
    hasher = blake3()
    for array in arrays.values():
        hasher.update(np.ascontiguousarray(array[:tokens]).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest(length=16)


class _Process:
    """What one process holds: arrays as an engine has them, and a tier on a store."""

    def __init__(self) -> None:
        self._engine: ArrayEngine | None = None
        self._store: Store | None = None
        self._tier: SessionTier | None = None
        self._prompts: dict[tuple[int, int], Array] = {}

    def prepare(self, capacity: int, sessions: list[int], tokens: int) -> dict[str, Any]:
        """Make the arrays, and the prompts of the sessions with these seeds: what is no part of any measurement."""
        self._engine = ArrayEngine.empty(large_layout(), capacity)
        self._prompts = {(seed, tokens): random_tokens(seed, tokens) for seed in sessions}
        return {}

    def open(self, path: str) -> dict[str, Any]:
        """Open the store, and so map its file."""
        assert self._engine is not None
        start = time.perf_counter()
        self._store = Store.open(path)
        self._tier = SessionTier(self._store, self._engine)
        return {"seconds": time.perf_counter() - start}

    def promote(self, seed: int, tokens: int, length: int) -> dict[str, Any]:
        """Promote the first tokens of a session, which all have to be there; the next one is left to compute."""
        assert self._tier is not None
        prompt = np.append(self._prompts[seed, tokens][:length], np.uint32(0))
        start = time.perf_counter()
        reused = self._tier.promote(prompt)
        seconds = time.perf_counter() - start
        if reused != length:
            raise AssertionError(f"promoted {reused} tokens of {length}: {self._tier.stats}")
        return {"seconds": seconds}

    def digest(self, length: int) -> dict[str, Any]:
        """What the arrays hold."""
        assert self._engine is not None
        return {"digest": digest_of(self._engine.arrays, length)}

    def read(self, path: str, length: int) -> dict[str, Any]:
        """Read as many bytes of a plain file into the arrays, with two threads."""
        assert self._engine is not None
        parts: list[tuple[memoryview, int]] = []
        at = 0
        for array in self._engine.arrays.values():
            flat = array[:length].reshape(-1).view(np.uint8).data
            parts += [(flat[start : start + _READ], at + start) for start in range(0, len(flat), _READ)]
            at += len(flat)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                start = time.perf_counter()
                got = sum(pool.map(lambda part: os.preadv(fd, [part[0]], part[1]), parts))
                seconds = time.perf_counter() - start
        finally:
            os.close(fd)
        if got != at:
            raise AssertionError(f"read {got} bytes of {at}")
        return {"seconds": seconds}

    def promotes(self, begin: float, seconds: float, order: list[int]) -> dict[str, Any]:
        """Promote whole sessions one after another, from one moment on and for so long; say how long each took."""
        assert self._tier is not None
        prompts = list(self._prompts.values())
        times: list[float] = []
        _wait_for(begin)
        start = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            prompt = prompts[order[len(times) % len(order)]]
            if self._tier.promote(prompt) != prompt.size - 1:
                raise AssertionError(f"a session was not promoted whole: {self._tier.stats}")
            times.append(time.monotonic() - now)
        return {"ms": [1e3 * t for t in times], "seconds": time.monotonic() - start, "rows": sum(p.size - 1 for p in prompts)}

    def cascades(self, begin: float, seconds: float, seed: int, length: int) -> dict[str, Any]:
        """Cascade new sessions one after another, from one moment on and for so long; evict each when the next is through."""
        assert self._tier is not None
        times: list[float] = []
        earlier: Array | None = None
        _wait_for(begin)
        start = time.monotonic()
        while time.monotonic() < begin + seconds:
            prompt = random_tokens(seed + len(times), length)
            self._stamp(prompt[0])
            now = time.monotonic()
            self._tier.cascade(prompt)
            self._tier.flush()
            times.append(time.monotonic() - now)
            if earlier is not None:
                self._tier.namespace.evict(earlier)
            earlier = prompt
        elapsed = time.monotonic() - start
        if earlier is not None:
            self._tier.namespace.evict(earlier)
        if self._tier.stats.save_misses:
            raise AssertionError(f"a cascade missed: {self._tier.stats}")
        return {"ms": [1e3 * t for t in times], "seconds": elapsed}

    def _stamp(self, number: int) -> None:
        """Make rows differ from those of every other session, so that no block is shared."""
        assert self._engine is not None
        for array in self._engine.arrays.values():
            array.reshape(array.shape[0], -1)[:, 0] = np.arange(array.shape[0]) + int(number) % 1000

    def memory(self) -> dict[str, Any]:
        """Bytes of this process's memory: its own, and pages of files, each page by itself and shared out among who has it."""
        found = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        size = {name: int(value.split()[0]) * 1024 for name, value in found.items()}
        return {"own": size["Anonymous"], "resident": size["Rss"], "share": size["Pss"]}

    def close(self) -> dict[str, Any]:
        """End the tier and the store."""
        if self._tier is not None:
            self._tier.close()
        if self._store is not None:
            self._store.close()
        return {}


def _wait_for(begin: float) -> None:
    left = begin - time.monotonic()
    if left > 0:
        time.sleep(left)


def main() -> int:
    """Answer until stdin ends."""
    process = _Process()
    names = ("prepare", "open", "promote", "digest", "read", "promotes", "cascades", "memory", "close")
    return serve(lambda send: nullcontext({name: getattr(process, name) for name in names}))


if __name__ == "__main__":
    sys.exit(main())
