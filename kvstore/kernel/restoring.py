"""Restore: blocks of a file into an engine's arrays, wherever their bytes are, checked in the same pass."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib
from kvstore.kernel.copying import Job, check_array, check_scatter
from kvstore.kernel.filemap import FileMap
from kvstore.kernel.rows import Rows
from kvstore.kernel.target import Target

if TYPE_CHECKING:
    from kvstore.kernel._native import CData

__all__ = ["FileSource", "Restored", "read_error", "restore"]


class FileSource:
    """A file that blocks are restored from. Whoever made it keeps descriptors and map open while a `restore` runs.

    Parameters
    ----------
    file_map : FileMap
        A map that reaches over every payload.
    fd : int
        Descriptor of the file, open for reading.
    direct_fd : int or None
        Another one, opened with O_DIRECT; None where the file system refuses that.

    Raises
    ------
    ValueError
        The map is closed.
    """

    __slots__ = ("_source", "length")

    def __init__(self, file_map: FileMap, fd: int, direct_fd: int | None = None) -> None:
        if not file_map.address:
            raise ValueError("the map of the file is closed")
        self.length = file_map.length
        self._source = ffi.new("kvs_source *", (file_map.address, fd, -1 if direct_fd is None else direct_fd))

    @property
    def pointer(self) -> CData:
        """The struct as the kernel takes it."""
        return self._source


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What came of each block.

    Attributes
    ----------
    failed : int32 array of shape (n,)
        -1 where a block is sound, else the index of its first stream whose checksum differs.
    errors : int32 array of shape (n,)
        0, or why a block couldn't be read; `read_error` says it in words. `failed` says nothing then.
    read : uint8 array of shape (n,)
        0 if all of a block came from the page cache, 1 if some of it was read through it, 2 if past it.
    """

    failed: NDArray[np.int32]
    errors: NDArray[np.int32]
    read: NDArray[np.uint8]

    @property
    def sound(self) -> bool:
        """Whether every block was read and is what was expected."""
        return not self.errors.any() and bool((self.failed < 0).all())


def read_error(error: int) -> str:
    """Say in words why a block couldn't be read."""
    return "the file ends before it" if error == lib.KVS_END_OF_FILE else os.strerror(error)


def restore(
    source: FileSource,
    rows: Sequence[Rows] | Target,
    payloads: NDArray[np.uint64],
    first: NDArray[np.int64],
    tokens: NDArray[np.int64],
    used: NDArray[np.int64],
    sums: NDArray[np.uint32],
    *,
    direct: NDArray[np.uint8],
    progress: NDArray[np.int32] | None = None,
    stop: NDArray[np.int32] | None = None,
    threads: int | None = None,
) -> Restored | None:
    """Copy blocks from a file into an engine's arrays, and check each segment in the same pass.

    What the page cache has is copied from the map; the rest is read in large pieces, several at once. A page that can't be
    read, because the disk fails or the file was truncated, is an error of its block and no signal. Streams are completed in
    their order, as far as reads of several neighbouring segments allow.

    The GIL is released. Any number of threads may call at once, for destinations of their own.

    Parameters
    ----------
    source : FileSource
        The file.
    rows : sequence of Rows, or Target
        The streams, in layout order; a Target is checked once for as many calls as come.
    first, tokens, used, sums, threads
        As for `scatter`. More threads than asked for may wait for the disk.
    payloads : ndarray of uint64, shape (n,)
        Offset of each payload in the file.
    direct : ndarray of uint8, shape (n,)
        Whether bytes of a block that the page cache doesn't have are to be read past it. They don't get into it then.
    progress : ndarray of int32, shape (len(rows),), optional
        Zeros; element s becomes 1 as soon as stream s is in place and sound, -1 if it isn't. For `progress_wait` on other threads.
    stop : ndarray of int32, shape (1,), optional
        As soon as another thread sets it to other than 0, what isn't under way is left.

    Returns
    -------
    Restored or None
        None if it was stopped before everything was done: nothing is said of any block then. The contents of the destinations are
        undefined unless all blocks are sound.

    Raises
    ------
    TypeError, ValueError
        As for `scatter`, or payloads reach beyond the map. Nothing has been written then.
    MemoryError
        There was no memory for the plan, or to read into. Nothing is said of any block, and the contents of the destinations are
        undefined then.
    """
    job = Job(rows, payloads, first, tokens, used, "used", threads)
    expected = check_array("sums", sums, np.uint32, (job.blocks, len(rows)))
    direct = check_array("direct", direct, np.uint8, (job.blocks,))
    for name, array, shape in (("progress", progress, (len(rows),)), ("stop", stop, (1,))):
        if array is not None and (array.dtype != np.int32 or array.shape != shape or not array.flags.c_contiguous):
            raise ValueError(f"{name} must be a contiguous int32 array of shape {shape}")
    failed = np.full(job.blocks, -1, np.int32)
    errors, read = np.zeros(job.blocks, np.int32), np.zeros(job.blocks, np.uint8)
    if job.empty:
        return Restored(failed, errors, read)
    check_scatter(job)
    if int((job.payloads + job.sizes().astype(np.uint64)).max()) > source.length:
        raise ValueError(f"a payload reaches beyond the {source.length} bytes that are mapped")
    error = lib.kvs_restore(
        source.pointer,
        job.rows,
        len(rows),
        job.blocks,
        job.pointer("uint64_t[]", job.payloads),
        job.pointer("int64_t[]", job.first),
        job.pointer("int64_t[]", job.tokens),
        job.pointer("int64_t[]", job.used),
        job.pointer("uint64_t[]", job.offsets),
        job.pointer("uint32_t[]", job.offset_row),
        job.pointer("uint32_t[]", expected),
        job.pointer("uint8_t[]", direct),
        ffi.from_buffer("uint32_t[]", job.sums, True),
        ffi.from_buffer("int32_t[]", errors, True),
        ffi.from_buffer("uint8_t[]", read, True),
        ffi.NULL if progress is None else ffi.from_buffer("int32_t[]", progress, True),
        ffi.NULL if stop is None else ffi.from_buffer("int32_t[]", stop, True),
        job.threads,
    )
    if error == errno.ECANCELED:
        return None
    if error:
        raise MemoryError(f"no memory for a restore of {job.blocks} blocks of {len(rows)} streams")
    job.compare(expected, failed)
    return Restored(failed, errors, read)
