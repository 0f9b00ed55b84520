"""LMCache's L2 adapters (of its multi-process mode) that keep files: `fs_native`, with C++ threads, and `fs`, in Python."""

from __future__ import annotations

import argparse
import json
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from benches.peers.driver import ALIGNMENT, ChunkDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]

_PATIENCE = 120_000  # ms


class _L2(ChunkDriver):
    def open(self, directory: Path, tokens: int) -> None:
        memory = self.reserve(tokens)
        spec: dict[str, Any] = {"type": self.options["backend"], "base_path": str(directory)}
        if self.options["backend"] == "fs_native":
            spec["num_workers"] = self.threads
        if self.options.get("direct"):
            spec["use_odirect"] = True
        directory.mkdir(parents=True, exist_ok=True)
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)])).adapters[0]
        self.memory = torch.from_numpy(memory)
        self.adapter: Any = create_l2_adapter(
            config, l1_memory_desc=L1MemoryDesc(ptr=self.memory.data_ptr(), size=self.memory.numel(), align_bytes=ALIGNMENT)
        )

    def close(self) -> None:
        if getattr(self, "adapter", None) is not None:
            self.adapter.close()
            self.adapter = None

    def _object(self, buffer: Bytes) -> Any:
        start = int(buffer.__array_interface__["data"][0]) - self.memory.data_ptr()
        data = self.memory[start : start + buffer.nbytes]
        meta = MemoryObjMetadata(
            shape=data.shape, dtype=torch.uint8, address=start, phy_size=buffer.nbytes, fmt=MemoryFormat.KV_2LTD, ref_count=1
        )
        return TensorMemoryObj(raw_data=data, parent_allocator=None, metadata=meta)

    def _keys(self, keys: Sequence[str]) -> list[Any]:
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        return [ObjectKey(chunk_hash=bytes.fromhex(key), model_name="bench", kv_rank=rank) for key in keys]

    def _wait(self, event: int, poll: Callable[[], Any]) -> Any:
        """Wait for the adapter's eventfd, as its own servers do."""
        while True:
            poller = select.poll()
            poller.register(event, select.POLLIN)
            if not poller.poll(_PATIENCE):
                raise TimeoutError("the adapter did not signal")
            consume_fd(event)
            result = poll()
            if result is not None:
                return result

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        task = self.adapter.submit_store_task(self._keys(keys), [self._object(buffer) for buffer in buffers])
        done = self._wait(self.adapter.get_store_event_fd(), lambda: self.adapter.pop_completed_store_tasks().get(task))
        if not done.is_successful():
            raise OSError("LMCache reports a store that failed")

    def count(self, keys: Sequence[str]) -> int:
        if not keys:
            return 0
        task = self.adapter.submit_lookup_and_lock_task(self._keys(keys), {})
        event = self.adapter.get_lookup_and_lock_event_fd()
        found = set(self._wait(event, lambda: self.adapter.query_lookup_and_lock_result(task)).get_indices_list())
        self.adapter.submit_unlock(self._keys(keys))
        return next((i for i in range(len(keys)) if i not in found), len(keys))

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        task = self.adapter.submit_load_task(self._keys(keys), [self._object(buffer) for buffer in buffers])
        found = set(self._wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task)).get_indices_list())
        return next((i for i in range(len(keys)) if i not in found), len(keys))


DRIVER = _L2
