"""The page cache, without root: dropping a file from it, and looking at what of a file is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

__all__ = ["drop", "resident"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident(path: Path) -> float:
    """The share of a file's pages that are in the page cache, as mincore sees it."""
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if not length:
            return 1.0
        with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) as view:
            array = np.frombuffer(view, np.uint8)
            found = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(array.ctypes.data, length, found.ctypes.data)
            error = ctypes.get_errno()
            del array
    if failed:
        raise OSError(error, f"mincore of {path}: {os.strerror(error)}")
    # in a sparse file nothing of a hole can be resident
    blocks = min(path.stat().st_blocks * 512 // mmap.PAGESIZE, found.size) or 1
    return min(float((found & 1).sum()) / blocks, 1.0)


def drop(path: Path) -> float:
    """Write a file back and ask for its pages to be dropped; return the share that stayed.

    Pages that some process has mapped stay: unmap the file first.
    """
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(path)
