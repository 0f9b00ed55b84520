"""Windows: pieces of a file side by side in one run of addresses."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib
from kvstore.kernel.copying import default_threads

__all__ = ["Window"]


class Window:
    """A run of memory that begins with pieces of a file, side by side, and goes on with zeros.

    It is private and copy on write: what is written to it is seen by this process alone, and never reaches the file. Pages
    that nobody writes to are those of the page cache. It costs address space and one map of the process for each piece
    (``vm.max_map_count`` limits their number), not memory. No byte is read when it is made: touching a page that the disk can't
    deliver, or that the file doesn't have any more, kills the process with SIGBUS; `populate` a range first where that matters.

    A forked child has a copy of it, whose pages are still those of the file. Threads may share a window; who closes it vouches
    that nobody uses it any more.

    Parameters
    ----------
    fd : int
        Descriptor of a file open for reading. Stays the caller's, and may be closed at once.
    offsets : uint64 array, 1-D
        File offsets of the pieces, multiples of the system's page size. Read during the call only.
    piece : int
        Bytes of each piece, a multiple of the page size. Piece i lies at ``i * piece``.
    length : int
        Bytes of the window, a multiple of the page size; at least those of all pieces. 0 makes a window that is closed.

    Attributes
    ----------
    address : int
        Where the first byte lies; 0 once the window is closed.
    length : int
        Its bytes; 0 once the window is closed.

    Raises
    ------
    ValueError
        An offset or a size isn't a multiple of the page size, or they don't fit together.
    OSError
        It can't be mapped: ENOMEM at a limit of address space or of the number of maps. Nothing is left mapped.
    """

    __slots__ = ("address", "length")

    address: int
    length: int

    def __init__(self, fd: int, offsets: NDArray[np.uint64], *, piece: int, length: int) -> None:
        self.address = self.length = 0
        page = mmap.PAGESIZE
        wanted = np.ascontiguousarray(offsets, np.uint64)
        if wanted.ndim != 1:
            raise ValueError(f"offsets must be a 1-D array, not one of shape {wanted.shape}")
        if piece < 0 or piece % page or length % page or (wanted % np.uint64(page)).any() or (wanted >= np.uint64(1 << 63)).any():
            raise ValueError(f"offsets, piece ({piece}) and length ({length}) must be multiples of the page size, {page}")
        if not wanted.size * piece <= length < 1 << 47 or (wanted.size and not piece):
            raise ValueError(f"length must be below 2**47 and at least that of {wanted.size} pieces of {piece} bytes, not {length}")
        if not length:
            return
        address = ffi.new("uint64_t *")
        given = ffi.from_buffer("uint64_t[]", wanted)
        if error := lib.kvs_window_open(fd, given, wanted.size, piece, length, address):
            raise OSError(error, f"cannot map {wanted.size} pieces of {piece} bytes: {os.strerror(error)}")
        self.address = address[0]
        self.length = length

    def populate(self, offset: int, length: int) -> None:
        """Bring a range into memory, so that reading it afterwards raises no signal. See `FileMap.populate`.

        Parameters
        ----------
        offset, length : int
            Bytes, within the window.

        Raises
        ------
        ValueError
            The range isn't within the window, or the window is closed.
        OSError
            The range can't be read: EFAULT behind the end of the file or on a bad sector, EHWPOISON for broken memory.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"[{offset}, {offset + length}) isn't within the window's {self.length} bytes")
        if error := lib.kvs_map_populate(self.address + offset, length):
            raise OSError(error, f"cannot read [{offset}, {offset + length}) of the window: {os.strerror(error)}")

    def detach(self, *, threads: int | None = None) -> None:
        """Replace it, in place, by private memory with the same bytes, those that were written to it included.

        Afterwards nothing of the file is in it. Other threads may read it meanwhile and see either the same bytes; none may
        write to it. Does nothing on a closed window. The GIL is released. Takes memory for all of it.

        Parameters
        ----------
        threads : int, optional
            Threads to copy with, 1 to 64; by default one for each processor, at most 8.

        Raises
        ------
        ValueError
            Another number of threads.
        OSError
            EFAULT or EHWPOISON where a page can't be read, ENOMEM without memory for the copy. The window is as it was.
        """
        threads = default_threads() if threads is None else threads
        if not 1 <= threads <= lib.KVS_MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {lib.KVS_MAX_THREADS}, not {threads}")
        if not self.length:
            return
        if error := lib.kvs_window_detach(self.address, self.length, threads):
            raise OSError(error, f"cannot replace {self.length} mapped bytes by a copy: {os.strerror(error)}")

    def close(self) -> None:
        """End the window; its addresses are invalid from here. A second call does nothing."""
        address, length = self.address, self.length
        self.address = self.length = 0
        if address:
            lib.kvs_window_close(address, length)

    def __del__(self) -> None:
        self.close()
