"""RocksDB (rocksdict): chunks in blob files, uncompressed; no log but a flush at the end of each save; reads verify checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import rocksdict

from benches.peers.driver import ChunkDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _Rocks(ChunkDriver):
    chunk_tokens: ClassVar[int] = 64
    durable: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.db: Any = None

    def open(self, directory: Path, tokens: int) -> None:
        self.reserve(tokens)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_enable_blob_files(True)  # large values apart from the tree, so that compaction doesn't rewrite them
        options.set_min_blob_size(64 << 10)
        options.set_write_buffer_size(64 << 20)
        options.increase_parallelism(self.threads)
        self.db = rocksdict.Rdict(str(directory), options)
        write = rocksdict.WriteOptions()
        write.disable_wal = True  # everything would be written twice
        self.db.set_write_options(write)

    def close(self) -> None:
        if self.db is not None:
            self.db.close()
            self.db = None

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        self.run(lambda one: self.db.put(one[0].encode(), memoryview(one[1]).tobytes()), zip(keys, buffers, strict=True))
        for key in keys:
            self.db.put(_mark(key), b"")
        self.db.flush(True)

    def count(self, keys: Sequence[str]) -> int:
        for i, key in enumerate(keys):
            if self.db.get(_mark(key)) is None:
                return i
        return len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        def one(pair: tuple[str, Bytes]) -> bool:
            value = self.db.get(pair[0].encode())
            if value is not None:
                pair[1][:] = np.frombuffer(value, np.uint8)
            return value is not None

        found = list(self.pool.map(one, zip(keys, buffers, strict=True)))
        return found.index(False) if False in found else len(found)


def _mark(key: str) -> bytes:
    """A small key beside a chunk's, so that asking whether it is there doesn't read it."""
    return b"there:" + key.encode()


DRIVER = _Rocks
