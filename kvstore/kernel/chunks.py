"""Restoring chunk by chunk through a few buffers, ahead of who takes the chunks out of them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib
from kvstore.kernel.copying import Job, check_array, check_used
from kvstore.kernel.restoring import FileSource, Restored
from kvstore.kernel.target import Target, check_apart

__all__ = ["restore_chunks"]


def restore_chunks(
    source: FileSource,
    targets: Sequence[Target],
    which: NDArray[np.uint32],
    ends: NDArray[np.uint64],
    payloads: NDArray[np.uint64],
    first: NDArray[np.int64],
    tokens: NDArray[np.int64],
    used: NDArray[np.int64],
    sums: NDArray[np.uint32],
    *,
    direct: NDArray[np.uint8],
    filled: NDArray[np.int32],
    taken: NDArray[np.int32],
    ahead: int,
    stop: NDArray[np.int32],
    threads: int | None = None,
) -> Restored | None:
    """Do what `restore` does, chunk after chunk, each into one of a few destinations, once that has been emptied.

    What it writes stays in the processor's caches, so that reading it right afterwards is cheap: a chunk should be a few MiB.
    The GIL is released.

    Parameters
    ----------
    source, payloads, tokens, used, sums, direct, threads
        As for `restore`.
    targets : sequence of Target
        Where chunks go, at least one of them. All describe the same streams, or skip some.
    which : ndarray of uint32, shape (chunks,)
        The destination of each chunk.
    ends : ndarray of uint64, shape (chunks,)
        For each chunk, ascending, the number of the block that follows its last one.
    first : ndarray of int64, shape (n,)
        Where each block's first token goes, relative to row 0 of its chunk's destination; ascending in each chunk.
    filled : ndarray of int32, shape (chunks,)
        Zeros; becomes 1 when a chunk is in place and sound, -1 if it isn't: then none behind it is begun any more. For
        `progress_wait`.
    taken : ndarray of int32, shape (chunks,)
        Zeros; to be set (`progress_set`) on another thread when a chunk is needed no more.
    ahead : int
        A chunk is begun once the one that comes `ahead + 1` before it is taken; at least 0.
    stop : ndarray of int32, shape (1,)
        As for `restore`. Whoever sets it lets go of `taken` as well (`progress_end`).

    Returns
    -------
    Restored or None
        None if it was stopped. What it says of blocks whose chunk was not begun is that they are sound.

    Raises
    ------
    TypeError, ValueError
        As for `restore`; or a chunk lies over one of the `ahead` before it. Nothing has been written then.
    MemoryError
        As for `restore`.
    """
    streams = _streams(targets)
    job = Job(targets[0], payloads, first, tokens, used, "used", threads, check=False)
    chunks = len(which)
    which = check_array("which", which, np.uint32, (chunks,))
    ends = check_array("ends", ends, np.uint64, (chunks,))
    expected = check_array("sums", sums, np.uint32, (job.blocks, streams))
    direct = check_array("direct", direct, np.uint8, (job.blocks,))
    for name, array, length in (("filled", filled, chunks), ("taken", taken, chunks), ("stop", stop, 1)):
        if array.dtype != np.int32 or array.shape != (length,) or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous int32 array of shape {(length,)}")
    ahead = min(ahead, chunks)
    _check_chunks(job, targets, which, ends, ahead)
    if int((job.payloads + job.sizes().astype(np.uint64)).max()) > source.length:
        raise ValueError(f"a payload reaches beyond the {source.length} bytes that are mapped")
    failed = np.full(job.blocks, -1, np.int32)
    errors, read = np.zeros(job.blocks, np.int32), np.zeros(job.blocks, np.uint8)
    error = lib.kvs_restore_chunks(
        source.pointer,
        ffi.from_buffer("kvs_rows[]", b"".join([target.packed for target in targets])),
        streams,
        chunks,
        job.pointer("uint32_t[]", which),
        job.pointer("uint64_t[]", ends),
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
        ffi.from_buffer("int32_t[]", filled, True),
        job.pointer("int32_t[]", taken),
        ahead,
        job.pointer("int32_t[]", stop),
        job.threads,
    )
    if error == errno.ECANCELED:
        return None
    if error:
        raise MemoryError(f"no memory for a restore of {job.blocks} blocks of {streams} streams in {chunks} chunks")
    wrong = job.sums != expected
    if wrong.any():
        skipped = np.array([target.skipped for target in targets])
        wrong &= ~skipped[_of_each_block(which, ends)] & (_of_each_block(filled, ends) != 0)[:, None]
        failed[:] = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)
    return Restored(failed, errors, read)


def _streams(targets: Sequence[Target]) -> int:
    """How many streams all targets have, which are the same ones."""
    if not targets or not len(targets[0]):
        raise ValueError("chunks need a destination, and a stream")
    for i, target in enumerate(targets[1:], 1):
        if not target.alike(targets[0]):
            raise ValueError(f"destination {i} has other streams than the first")
    return len(targets[0])


def _of_each_block(values: NDArray[Any], ends: NDArray[np.uint64]) -> NDArray[Any]:
    """Repeat the value of each chunk for its blocks."""
    return np.repeat(values, np.diff(ends, prepend=np.uint64(0)).astype(np.intp))


def _check_chunks(job: Job, targets: Sequence[Target], which: NDArray[np.uint32], ends: NDArray[np.uint64], ahead: int) -> None:
    """Refuse chunks that are none, don't fit their destinations, or lie over one another or over blocks of their own."""
    if not len(ends) or (np.diff(ends.astype(np.int64), prepend=0) <= 0).any() or int(ends[-1]) != job.blocks:
        raise ValueError(f"ends must ascend from above 0 to the number of blocks, {job.blocks}")
    if int(which.max()) >= len(targets) or ahead < 0:
        raise ValueError(f"there are {len(targets)} destinations; which holds {which.max()}, and ahead is {ahead}")
    check_used(job)
    follows = job.first[:-1] + job.used[:-1] <= job.first[1:]
    follows[ends[:-1].astype(np.intp) - 1] = True  # what comes next is another chunk
    if not follows.all():
        raise ValueError(f"blocks {int(follows.argmin())} and the next, of one chunk, overlap or don't ascend")
    of_block = _of_each_block(which, ends)
    for i, target in enumerate(targets):
        mine = of_block == i
        target.check_room(job.first[mine], job.used[mine], "used")
        target.check()
    after = which.tolist()
    pairs = {(min(pair), max(pair)) for back in range(1, ahead + 1) for pair in zip(after[:-back], after[back:], strict=True)}
    for one, other in pairs:
        if one == other:
            raise ValueError(f"destination {one} takes a chunk while it may still hold one of the {ahead} before that")
        check_apart(targets[one], targets[other])
