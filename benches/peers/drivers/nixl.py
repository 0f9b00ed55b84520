"""NIXL's POSIX plugin, a transport only: one file a session, written and read straight between it and the engine's arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import nixl_cu12._api as api

from benches.peers.driver import ALIGNMENT
from benches.peers.drivers.session_files import SessionDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]

_PIECE = 4 << 20


class _Nixl(SessionDriver):
    suffix: ClassVar[str] = ".bin"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.agent: Any = api.nixl_agent("bench", api.nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {f"use_{options.get('engine', 'aio')}": "true"})

    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        partial = path.with_suffix(".partial")
        stride = self._stride(len(arrays[0]))
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, stride * len(arrays))
            self._transfer("WRITE", fd, [(array, i * stride) for i, array in enumerate(arrays)])
            os.fdatasync(fd)
        finally:
            os.close(fd)
        partial.replace(path)

    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            stride = os.fstat(fd).st_size // len(arrays)
            self._transfer("READ", fd, [(array[:length], i * stride) for i, array in enumerate(arrays)])
        finally:
            os.close(fd)

    def _stride(self, tokens: int) -> int:
        return -(-tokens * self.shape.row_bytes // ALIGNMENT) * ALIGNMENT

    def _transfer(self, operation: str, fd: int, parts: Sequence[tuple[Bytes, int]]) -> None:
        memory, file = [], []
        for array, offset in parts:
            address = int(array.__array_interface__["data"][0])
            for at in range(0, array.nbytes, _PIECE):
                size = min(_PIECE, array.nbytes - at)
                memory.append((address + at, size, 0))
                file.append((offset + at, size, fd))
        end = max(offset + size for offset, size, _ in file)
        own = self.agent.register_memory([(*one, "m") for one in memory], "DRAM", backends=["POSIX"])
        theirs = self.agent.register_memory([(0, end, fd, "f")], "FILE", backends=["POSIX"])
        handle = self.agent.initialize_xfer(
            operation, self.agent.get_xfer_descs(memory, "DRAM"), self.agent.get_xfer_descs(file, "FILE"), "bench"
        )
        state = self.agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise OSError("a NIXL transfer failed")
            time.sleep(0.0002)
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(own)
        self.agent.deregister_memory(theirs)


DRIVER = _Nixl
