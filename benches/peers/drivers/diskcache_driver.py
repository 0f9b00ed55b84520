"""diskcache: chunks as bytes under their keys, each in a file of its own, with an index in SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import diskcache

from benches.peers.driver import ChunkDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _DiskCache(ChunkDriver):
    chunk_tokens: ClassVar[int] = 64

    def open(self, directory: Path, tokens: int) -> None:
        self.reserve(tokens)
        self.cache: Any = diskcache.Cache(str(directory), size_limit=1 << 40, eviction_policy="none")

    def close(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        self.run(lambda one: self.cache.set(one[0], memoryview(one[1]).tobytes()), zip(keys, buffers, strict=True))

    def count(self, keys: Sequence[str]) -> int:
        for i, key in enumerate(keys):
            if key not in self.cache:
                return i
        return len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        def one(pair: tuple[str, Bytes]) -> None:
            with self.cache.get(pair[0], read=True) as file:  # the file itself: read without a copy of its bytes
                if file.readinto(pair[1]) != pair[1].nbytes:
                    raise OSError("a short value")

        self.run(one, zip(keys, buffers, strict=True))
        return len(keys)


DRIVER = _DiskCache
