"""LMCache's `local_disk` backend of its in-process mode. Its index is in memory only."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("PYTHONHASHSEED", "0")

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from benches.peers.driver import ALIGNMENT, ChunkDriver
from benches.peers.shape import Bytes, Tokens

__all__ = ["DRIVER"]

_PATIENCE = 120.0  # s


class _LocalDisk(ChunkDriver):
    reopens: ClassVar[bool] = False

    def open(self, directory: Path, tokens: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        size, layers = self.chunk_tokens_used, self.shape.layers
        self.kv = torch.Size([2, layers, size, self.shape.row_bytes // 2])
        room = tokens * self.shape.token_bytes / 2**30
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=size,
            local_cpu=False,
            max_local_cpu_size=room + 0.1,
            local_disk=str(directory),
            max_local_disk_size=4 * room + 0.1,
            lmcache_instance_id="bench",
            extra_config={"use_odirect": False, "disk_io_threads": self.threads, "local_cpu.pinned_align_bytes": ALIGNMENT},
        )
        meta = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, size, 1, self.shape.row_bytes // 2),
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.cpu: Any = LocalCPUBackend(config, meta, "cpu")
        self.disk: Any = LocalDiskBackend(config, self.loop, self.cpu, "cpu", None, meta)
        self.held: list[Any] = []

    def close(self) -> None:
        if getattr(self, "disk", None) is not None:
            self._let_go()
            self.disk.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(10)
            self.disk = None

    def _keys(self, keys: Sequence[str]) -> list[Any]:
        return [CacheEngineKey("bench", 1, 0, int(key[:16], 16) >> 1, torch.bfloat16) for key in keys]

    def _let_go(self) -> None:
        for one in self.held:
            one.ref_count_down()
        self.held = []
        self.buffers = []

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        self._let_go()
        count = len(tokens) // self.chunk_tokens_used
        have = self.count(self.keys(tokens))
        # its own pool's memory, as its engine uses it; only what is new is allocated
        self.held = [self.cpu.allocate(self.kv, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(have, count)]
        empty = np.empty(0, np.uint8)
        self.buffers = [empty] * have + [np.frombuffer(one.byte_array, np.uint8) for one in self.held]
        super().save(tokens, arrays)

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        done = threading.Semaphore(0)
        self.disk.batched_submit_put_task(self._keys(keys), self.held, on_complete_callback=lambda key: done.release())
        for _ in keys:
            if not done.acquire(timeout=_PATIENCE):
                raise TimeoutError("a put was never completed")

    def count(self, keys: Sequence[str]) -> int:
        for i, key in enumerate(self._keys(keys)):
            if not self.disk.contains(key):
                return i
        return len(keys)

    def fetch(self, tokens: Tokens) -> int:
        self._let_go()
        return super().fetch(tokens)

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        found = self.disk.batched_get_blocking(self._keys(keys))
        leading = next((i for i, one in enumerate(found) if one is None), len(found))
        self.held = [one for one in found if one is not None]
        self.buffers = [np.frombuffer(one.byte_array, np.uint8) for one in found[:leading]]
        return leading


DRIVER = _LocalDisk
