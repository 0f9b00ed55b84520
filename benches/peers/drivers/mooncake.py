"""Mooncake store: a master and an embedded client on loopback over TCP, with its tier on SSD. Both belong to this process.

Objects go to memory first and are offloaded to bucket files by a heartbeat. Restores are of a client that was started anew, so that
they come from the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benches.peers.driver import ChunkDriver, files_of
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]

_PATIENCE = 60.0  # s
_PR_SET_PDEATHSIG = 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Mooncake(ChunkDriver):
    chunk_tokens: ClassVar[int] = 64
    reopens: ClassVar[bool] = False  # it does, but the client's library can be set up once a process

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.master: subprocess.Popen[bytes] | None = None
        self.store: Any = None

    def open(self, directory: Path, tokens: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory = directory.resolve()  # it takes no other path
        size = tokens * self.shape.token_bytes
        port = _free_port()
        binary = Path(sys.prefix) / "bin" / "mooncake_master"
        self.master = subprocess.Popen(
            [
                str(binary),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={_free_port()}",
                "--enable_offload=true",
                "--logtostderr",
                "--minloglevel=2",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
            preexec_fn=_die_with_parent,
        )
        os.environ |= {
            "MC_FORCE_TCP": "1",
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(directory),
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(8 * size + (1 << 30)),
            # objects reach a file once a bucket is full: with more than one in it, the last of a save would stay in memory
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(self.chunk_bytes),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(512 << 20),
        }
        from mooncake.store import MooncakeDistributedStore

        deadline = time.monotonic() + _PATIENCE
        while True:  # until the master listens
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > deadline or self.master.poll() is not None:
                raise TimeoutError("mooncake_master did not start")
            time.sleep(0.05)
        self.store = MooncakeDistributedStore()
        segment = max(4 * size, 256 << 20)
        code = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, 512 << 20, "tcp", "", f"127.0.0.1:{port}", None, True, str(directory)
        )
        if code:
            raise OSError(f"Mooncake's setup returned {code}")
        memory = self.reserve(tokens)
        self.address = int(memory.__array_interface__["data"][0])
        if self.store.register_buffer(self.address, memory.nbytes):
            raise OSError("Mooncake refused the buffers")
        self.put_bytes = 0

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None

    @staticmethod
    def _places(buffers: Sequence[Bytes]) -> tuple[list[int], list[int]]:
        return [int(b.__array_interface__["data"][0]) for b in buffers], [b.nbytes for b in buffers]

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        codes = self.store.batch_put_from(list(keys), *self._places(buffers))
        if any(codes):
            raise OSError(f"Mooncake's put returned {codes}")
        self.put_bytes += sum(b.nbytes for b in buffers)

    def settle(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while sum(path.stat().st_size for path in files_of(self.directory)) < 0.99 * self.put_bytes:
            if time.monotonic() > deadline:
                raise TimeoutError("Mooncake did not offload what was put")
            time.sleep(0.05)

    def count(self, keys: Sequence[str]) -> int:
        found = self.store.batch_is_exist(list(keys)) if keys else []
        return next((i for i, one in enumerate(found) if one != 1), len(keys))

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        sizes = self.store.batch_get_into(list(keys), *self._places(buffers))
        return next((i for i, one in enumerate(sizes) if one != self.chunk_bytes), len(sizes))


DRIVER = _Mooncake
