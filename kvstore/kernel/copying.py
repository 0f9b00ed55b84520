"""Gather and scatter: the checked way into the native kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib
from kvstore.kernel.rows import Rows
from kvstore.kernel.target import Target

if TYPE_CHECKING:
    from kvstore.kernel._native import CData

__all__ = ["SEGMENT_ALIGN", "default_threads", "gather", "payload_bytes", "scatter"]

SEGMENT_ALIGN: int = 64
"""Segments of a payload start at multiples of this many bytes. On disk: never changes within a format version."""

if lib.KVS_SEGMENT_ALIGN != SEGMENT_ALIGN:
    raise ImportError("kvstore.kernel and its compiled part are of different versions: rebuild the package")

_ADDRESS_SPACE = 1 << 47
_MAX_THREADS: int = lib.KVS_MAX_THREADS


def default_threads() -> int:
    """Return how many threads a copy uses unless told: the processors that this process may run on, at most 8."""
    try:
        return min(8, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        return min(8, os.cpu_count() or 1)


def payload_bytes(rows: Sequence[Rows], tokens: int) -> int:
    """Return the size of a payload of `tokens` tokens, a multiple of `SEGMENT_ALIGN`.

    Raises
    ------
    ValueError
        `tokens` is negative.
    """
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, but is {tokens}")
    return sum(-(-(tokens // r._tokens_per_row * r._row_bytes) // SEGMENT_ALIGN) * SEGMENT_ALIGN for r in rows)


def gather(
    rows: Sequence[Rows],
    payloads: NDArray[np.uint64],
    first: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    threads: int | None = None,
) -> NDArray[np.uint32]:
    """Copy blocks out of an engine's arrays into payloads, and checksum each segment in the same pass.

    A payload holds, for each stream in order, ``tokens // tokens_per_row`` rows as a C-contiguous array in the
    engine's own axis order, from an offset aligned to `SEGMENT_ALIGN`; what lies between is zeroed. The segment of
    a skipped stream is left as it is, its padding too.

    The GIL is released. Any number of threads may call at once, for payloads of their own. Nobody may write to the
    arrays meanwhile.

    Parameters
    ----------
    rows : sequence of Rows
        The streams, in layout order.
    payloads : ndarray of uint64, shape (n,)
        Addresses of the payload buffers, writable, of ``payload_bytes(rows, tokens[i])`` bytes each. The caller
        vouches for them and keeps them alive.
    first : ndarray of int64, shape (n,)
        Each block's first token, relative to row 0 of the arrays; a multiple of every ``tokens_per_row``.
    tokens : ndarray of int64, shape (n,)
        Tokens of each block.
    threads : int, optional
        How many threads work, the caller's among them; `default_threads()` unless given.

    Returns
    -------
    ndarray of uint32, shape (n, len(rows))
        CRC32C of each segment without its padding; 0 for a skipped stream.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype or shape, rows beyond an array's end are asked for, or two payloads
        overlap. Nothing has been written then.
    """
    job = Job(rows, payloads, first, tokens, tokens, "tokens", threads)
    if job.empty:
        return job.sums
    _check_payloads_apart(job.payloads, job.sizes())
    lib.kvs_gather(
        job.rows,
        len(rows),
        job.blocks,
        job.pointer("uint64_t[]", job.payloads),
        job.pointer("int64_t[]", job.first),
        job.pointer("int64_t[]", job.tokens),
        job.pointer("uint64_t[]", job.offsets),
        job.pointer("uint32_t[]", job.offset_row),
        ffi.from_buffer("uint32_t[]", job.sums, True),
        job.threads,
    )
    return job.sums


def scatter(
    rows: Sequence[Rows],
    payloads: NDArray[np.uint64],
    first: NDArray[np.int64],
    tokens: NDArray[np.int64],
    used: NDArray[np.int64],
    sums: NDArray[np.uint32],
    *,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """Copy blocks from payloads into an engine's arrays, and check each segment in the same pass.

    The GIL is released. Any number of threads may call at once, for destinations of their own. A payload on a map must
    have been populated: a page that can't be read is a signal otherwise.

    Parameters
    ----------
    rows : sequence of Rows
        The streams, in layout order.
    payloads : ndarray of uint64, shape (n,)
        Addresses of payloads of ``payload_bytes(rows, tokens[i])`` readable bytes each. The caller vouches for
        them and keeps them alive.
    first : ndarray of int64, shape (n,)
        Where each block's first token goes, relative to row 0 of the arrays; a multiple of every ``tokens_per_row``.
    tokens : ndarray of int64, shape (n,)
        Tokens that each payload holds.
    used : ndarray of int64, shape (n,)
        How many of them are copied, from the block's start. The checksum covers all of them even so.
    sums : ndarray of uint32, shape (n, len(rows))
        The CRC32C that each segment must have; ignored for skipped streams.
    threads : int, optional
        How many threads work, the caller's among them; `default_threads()` unless given.

    Returns
    -------
    ndarray of int32, shape (n,)
        -1 where a block is sound, else the index of its first stream whose checksum differs. The contents of the
        destinations are undefined unless all are -1.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype or shape, rows beyond an array's end are asked for, or something would be
        written twice: by a destination that overlaps itself or another one, by slots that aren't distinct, or
        by blocks whose tokens overlap; or a payload lies within a destination. Nothing has been written then.
    """
    job = Job(rows, payloads, first, tokens, used, "used", threads)
    expected = check_array("sums", sums, np.uint32, (job.blocks, len(rows)))
    failed = np.full(job.blocks, -1, np.int32)
    if job.empty:
        return failed
    check_scatter(job)
    _check_payloads_outside(rows, job.payloads, job.sizes())
    lib.kvs_scatter(
        job.rows,
        len(rows),
        job.blocks,
        job.pointer("uint64_t[]", job.payloads),
        job.pointer("int64_t[]", job.first),
        job.pointer("int64_t[]", job.tokens),
        job.pointer("int64_t[]", job.used),
        job.pointer("uint64_t[]", job.offsets),
        job.pointer("uint32_t[]", job.offset_row),
        ffi.from_buffer("uint32_t[]", job.sums, True),
        job.threads,
    )
    job.compare(expected, failed)
    return failed


def check_scatter(job: Job) -> None:
    """Refuse, with ValueError, what would copy more than there is or write something twice."""
    check_used(job)
    _check_blocks_apart(job.first, job.used)
    job.target.check()


def check_used(job: Job) -> None:
    """Refuse, with ValueError, to copy more of a block than it has."""
    if (job.used > job.tokens).any():
        i = int((job.used > job.tokens).argmax())
        raise ValueError(f"used[{i}] is {job.used[i]}, more than the {job.tokens[i]} tokens of the block")


class Job:
    """The checked arguments of a call, in the form in which the kernel takes them. `check`: whether all blocks go to these rows."""

    def __init__(
        self,
        rows: Sequence[Rows] | Target,
        payloads: NDArray[np.uint64],
        first: NDArray[np.int64],
        tokens: NDArray[np.int64],
        used: NDArray[np.int64],
        used_name: str,
        threads: int | None,
        *,
        check: bool = True,
    ) -> None:
        self.target = target = Target.of(rows)
        if threads is None:
            threads = default_threads()
        elif not 1 <= threads <= _MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {_MAX_THREADS}, not {threads}")
        self.threads = threads
        self.payloads = check_array("payloads", payloads, np.uint64, None)
        self.blocks = blocks = self.payloads.size
        self.first = check_array("first", first, np.int64, (blocks,))
        self.tokens = check_array("tokens", tokens, np.int64, (blocks,))
        self.used = self.tokens if used is tokens else check_array(used_name, used, np.int64, (blocks,))
        self.sums = np.zeros((blocks, len(target)), np.uint32)
        self.empty = not (blocks and len(target))
        if self.empty:
            return
        longest = int(self.tokens.max())
        for name, values in (("first", self.first), ("tokens", self.tokens), (used_name, self.used)):
            if values.min() < 0:
                raise ValueError(f"{name} must not be negative, but holds {values.min()}")
        # exact only where it matters: in Python's numbers, which don't wrap
        size = int((longest // target.tokens_per_row).astype(float) @ target.row_bytes + SEGMENT_ALIGN * len(target))
        if size >= _ADDRESS_SPACE // 2:
            size = payload_bytes(target.rows, longest)
        if size >= _ADDRESS_SPACE:
            raise ValueError(f"a payload of {longest} tokens would take {size} bytes, more than can be addressed")
        if check:
            target.check_room(self.first, self.used, used_name)
        if not self.payloads.all() or int(self.payloads.max()) > _ADDRESS_SPACE * 2**9 - size:
            raise ValueError("payloads hold an address that is none, such as 0")
        if (self.tokens == longest).all():  # mostly; telling them apart takes ten times as long
            distinct, self.offset_row = self.tokens[:1], np.zeros(blocks, np.uint32)
        else:
            distinct, which = np.unique(self.tokens, return_inverse=True)
            self.offset_row = which.astype(np.uint32)
        segments = (distinct[:, None] // target.tokens_per_row * target.row_bytes + (SEGMENT_ALIGN - 1)) & -SEGMENT_ALIGN
        ends = np.cumsum(segments, axis=1)
        self.offsets = (ends - segments).astype(np.uint64)
        self._ends = ends[:, -1]
        self.rows = ffi.from_buffer("kvs_rows[]", target.packed)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each payload."""
        sizes: NDArray[np.int64] = self._ends[self.offset_row]
        return sizes

    def compare(self, expected: NDArray[np.uint32], failed: NDArray[np.int32]) -> None:
        """Note in `failed` each block's first stream whose sum isn't the expected one."""
        wrong = self.sums != expected
        if wrong.any():
            wrong[:, self.target.skipped] = False
            failed[:] = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)

    @staticmethod
    def pointer(cdecl: str, array: NDArray[Any]) -> CData:
        return ffi.from_buffer(cdecl, array)


def check_array(name: str, array: NDArray[Any], dtype: type, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Return a C-contiguous array, having checked its dtype and shape; None stands for any one-dimensional shape."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an array of {np.dtype(dtype)}, not {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be an array of {np.dtype(dtype)}, not of {array.dtype}")
    if (array.ndim != 1) if shape is None else (array.shape != shape):
        raise ValueError(f"{name} must have shape {shape or '(n,)'}, not {array.shape}")
    return np.ascontiguousarray(array)


def _overlap(starts: NDArray[Any], lengths: NDArray[Any]) -> bool:
    """Do any two of the ranges share a point? Empty ones share none."""
    ends = starts + lengths.astype(starts.dtype)
    if (ends[:-1] <= starts[1:]).all():
        return False
    some = lengths > 0
    order = np.argsort(starts[some], kind="stable")
    return bool((ends[some][order][:-1] > starts[some][order][1:]).any())


def _check_payloads_apart(payloads: NDArray[np.uint64], sizes: NDArray[np.int64]) -> None:
    if _overlap(payloads, sizes):
        raise ValueError("payloads overlap: a block would be written over another")


def _check_blocks_apart(first: NDArray[np.int64], used: NDArray[np.int64]) -> None:
    if _overlap(first, used):
        raise ValueError("blocks overlap: their tokens [first, first + used) would be written twice")


def _check_payloads_outside(rows: Sequence[Rows], payloads: NDArray[np.uint64], sizes: NDArray[np.int64]) -> None:
    ends = payloads + sizes.astype(np.uint64)
    first, end = int(payloads.min()), int(ends.max())
    for i, r in enumerate(rows):
        if r._array is None:
            continue
        low, high = r._destination()
        if high <= first or end <= low:  # mostly: payloads lie together
            continue
        if (hit := (payloads < high) & (ends > low) & (sizes > 0)).any():
            raise ValueError(
                f"payload {int(hit.argmax())} lies within the destination of stream {i}: it would be overwritten while it is read"
            )
