"""torch: `torch.save` of a dictionary of tensors, `torch.load(mmap=True, weights_only=True)`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from benches.peers.drivers.session_files import SessionDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _Torch(SessionDriver):
    suffix: ClassVar[str] = ".pt"

    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save({f"s{i}": torch.from_numpy(array) for i, array in enumerate(arrays)}, file)
            file.flush()
            os.fdatasync(file.fileno())
        partial.replace(path)

    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        stored = torch.load(path, mmap=True, weights_only=True)
        self.copy((to[:length], stored[f"s{i}"].numpy()[:length]) for i, to in enumerate(arrays))


DRIVER = _Torch
