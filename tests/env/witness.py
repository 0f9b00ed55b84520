"""What a child wrote to a store's data file and what it waited for, in order; and what a power loss would leave of it."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["PRELOADED", "Note", "build", "images", "read"]

_SOURCE = Path(__file__).with_name("witness.c")
_NOTE = struct.Struct("=cqq")
_SECTOR = 4096

# for the child's code
PRELOADED = """
import ctypes
_witness = ctypes.CDLL(None)
def mark(number): _witness.witness_mark(ctypes.c_int64(number))
def fail(waits): _witness.witness_fail(ctypes.c_long(waits))
"""


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that happened.

    `kind` is w (a write), W (one that is on the disk when it returns), s (a wait that succeeded), f (one that was made to fail),
    d (a wait for a directory, whose path is `data`; only where asked for) or m (a mark, whose number is `offset`).
    """

    kind: str
    offset: int
    data: bytes


def build(directory: Path) -> Path:
    """Compile the library to preload."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no compiler {compiler!r}")
    library = directory / "witness.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library


def read(path: Path) -> list[Note]:
    """Read what a child has noted."""
    raw, at, notes = path.read_bytes(), 0, []
    while at < len(raw):
        kind, offset, length = _NOTE.unpack_from(raw, at)
        at += _NOTE.size
        notes.append(Note(kind.decode(), offset, raw[at : at + length]))
        at += length
    return notes


def _apply(image: bytearray, offset: int, data: bytes) -> None:
    if offset + len(data) > len(image):
        image.extend(bytes(offset + len(data) - len(image)))
    image[offset : offset + len(data)] = data


def _sectors(note: Note) -> Iterator[tuple[int, bytes]]:
    """The parts of a write that reach the disk each for itself."""
    at = 0
    while at < len(note.data):
        step = _SECTOR - (note.offset + at) % _SECTOR
        yield note.offset + at, note.data[at : at + step]
        at += step


def images(before: bytes, notes: list[Note], chosen: random.Random, share: float) -> Iterator[tuple[int, bytes]]:
    """Power losses: (number of the last mark, what the file may hold then), at a random `share` of all moments and at every mark.

    What a wait has covered is there. Of what was written since, any sectors are and the others are not; the file's length is that
    of the last sector that is, as a file system may have it.
    """
    durable, pending, marked = bytearray(before), list[Note](), 0
    for note in notes:
        if note.kind == "W":
            _apply(durable, note.offset, note.data)
        elif note.kind == "w":
            pending.append(note)
        elif note.kind == "s":
            for written in pending:
                _apply(durable, written.offset, written.data)
            pending.clear()
        elif note.kind == "m":
            marked = note.offset
        if note.kind != "m" and chosen.random() > share:
            continue
        kept = chosen.choice([0.0, 0.3, 0.7, 1.0])
        image = bytearray(durable)
        for written in pending:
            whole = chosen.random()  # most often a write is there as a whole or not at all: an index page without its data
            for offset, sector in _sectors(written):
                if (whole if whole < 0.8 else chosen.random()) < kept:
                    _apply(image, offset, sector)
        yield marked, bytes(image)
