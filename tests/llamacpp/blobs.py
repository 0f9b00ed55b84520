"""Sequence blobs made by hand, from what llama.cpp's source writes, independently of the adapter's own code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Blob = npt.NDArray[np.uint8]
F16, Q8_0 = 1, 8


def blob(
    positions: Sequence[int],
    *,
    version: int = 4,
    transposed: bool = False,
    layers: int = 2,
    seq: int = 1,
    kind: int = F16,
    elements: int = 32,
    streams: int = 1,
    seed: int = 7,
) -> Blob:
    """Write a blob of these cells with random rows."""
    rng = np.random.default_rng(seed)
    size = {F16: 2, Q8_0: 34 / 32}[kind]
    row, cells = int(elements * size), len(positions)
    out = [struct.pack("<IiI", 0xAF143CD8, seq, streams), struct.pack("<I", cells)]
    out += [struct.pack("<iIi", p, 1, seq) for p in positions]
    out.append(struct.pack("<II", transposed, layers))
    if version == 4:
        out.append(struct.pack("<II", 64, 64))
    for _ in range(layers):
        out += [struct.pack("<iQ", kind, row), rng.bytes(row * cells)]
    for _ in range(layers):
        head = struct.pack("<iII", kind, 2, elements) if transposed else struct.pack("<iQ", kind, row)
        out += [head, rng.bytes(row * cells)]
    return np.frombuffer(b"".join(out), np.uint8).copy()
