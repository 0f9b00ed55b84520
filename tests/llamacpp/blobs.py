"""Sequence blobs made by hand, from what llama.cpp's source writes, independently of the adapter's own code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Blob = npt.NDArray[np.uint8]
F32, F16, Q8_0 = 0, 1, 8


def section(
    positions: Sequence[int], seq: int, version: int, transposed: bool, layers: int, kind: int, elements: int, mrope: bool, rng: Any
) -> list[bytes]:
    """Write one section of cells with random rows."""
    size = {F16: 2, Q8_0: 34 / 32}[kind]
    row, cells = int(elements * size), len(positions)
    out = [struct.pack("<I", cells)]
    out += [struct.pack("<iI", p, 1) + struct.pack("<iii", p, p, 9) * mrope + struct.pack("<i", seq) for p in positions]
    out.append(struct.pack("<II", transposed, layers))
    if version == 4:
        out.append(struct.pack("<II", 64, 64))
    for _ in range(layers):
        out += [struct.pack("<iQ", kind, row), rng.bytes(row * cells)]
    for _ in range(layers):
        head = struct.pack("<iII", kind, 2, elements) if transposed else struct.pack("<iQ", kind, row)
        out += [head, rng.bytes(row * cells)]
    return out


def recurrent(position: int, rng: Any) -> list[bytes]:
    """Write the recurrent section of a model with three layers, two of them recurrent."""
    out = [struct.pack("<IiIII", 1, position, 0, 0, 3)]
    for elements in (24, 24, 40, 40):
        out += [struct.pack("<iQ", F32, 4 * elements), rng.bytes(4 * elements)]
    return out


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
    mrope: bool = False,
    window: int = 0,
    hybrid: bool = False,
) -> Blob:
    """Write a blob of these cells with random rows; a window of that many of the last cells, and a recurrent part, if asked for."""
    rng = np.random.default_rng(seed)
    out = [struct.pack("<IiI", 0xAF143CD8, seq, streams)]
    out += section(positions, seq, version, transposed, layers, kind, elements, mrope, rng)
    if window:
        out.append(struct.pack("<I", 1))
        out += section(positions[-window:], seq, version, transposed, layers, kind, elements, mrope, rng)
    if hybrid:
        out += recurrent(positions[-1], rng)
    return np.frombuffer(b"".join(out), np.uint8).copy()
