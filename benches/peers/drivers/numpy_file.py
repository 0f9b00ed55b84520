"""numpy: one .npy file a session, written whole, read through `numpy.load(mmap_mode="r")`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benches.peers.drivers.session_files import SessionDriver, write_durably
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _Numpy(SessionDriver):
    suffix: ClassVar[str] = ".npy"

    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        head = io.BytesIO()
        shape = (len(arrays), *arrays[0].shape)
        np.lib.format.write_array_header_2_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
        write_durably(path, [np.frombuffer(head.getvalue(), np.uint8), *map(np.ascontiguousarray, arrays)])

    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        stored = np.load(path, mmap_mode="r")
        self.copy((to[:length], stored[i, :length]) for i, to in enumerate(arrays))


DRIVER = _Numpy
