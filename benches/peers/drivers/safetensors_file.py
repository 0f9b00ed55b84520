"""safetensors: one file a session, a tensor a stream; `safe_open` maps it, and slices are taken of each tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from safetensors import safe_open
from safetensors.numpy import save_file

from benches.peers.drivers.session_files import SessionDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _Safetensors(SessionDriver):
    suffix: ClassVar[str] = ".safetensors"

    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        partial = path.with_suffix(".partial")
        save_file({f"s{i}": array for i, array in enumerate(arrays)}, partial)
        fd = os.open(partial, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        partial.replace(path)

    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        with safe_open(path, framework="pt") as file:  # tensors of torch are views of the map; of numpy they would be copies

            def one(i: int) -> None:
                arrays[i][:length] = file.get_slice(f"s{i}")[:length].numpy()

            self.run(one, range(len(arrays)))


DRIVER = _Safetensors
