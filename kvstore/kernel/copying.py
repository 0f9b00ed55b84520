"""Gather and scatter: the checked way into the native kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel._native import ffi, lib
from kvstore.kernel.rows import Rows

if TYPE_CHECKING:
    from kvstore.kernel._native import CData

__all__ = ["SEGMENT_ALIGN", "check_destinations", "default_threads", "gather", "payload_bytes", "scatter"]

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
    check_scatter(job, rows)
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
    job.compare(rows, expected, failed)
    return failed


def check_scatter(job: Job, rows: Sequence[Rows]) -> None:
    """Refuse, with ValueError, what would copy more than there is or write something twice."""
    check_used(job)
    _check_blocks_apart(job.first, job.used)
    _check_destinations_apart(rows)


def check_used(job: Job) -> None:
    """Refuse, with ValueError, to copy more of a block than it has."""
    if (job.used > job.tokens).any():
        i = int((job.used > job.tokens).argmax())
        raise ValueError(f"used[{i}] is {job.used[i]}, more than the {job.tokens[i]} tokens of the block")


def check_destinations(rows: Sequence[Rows]) -> None:
    """Refuse destinations that `scatter` would refuse, also where they are to be written by several calls.

    Raises
    ------
    ValueError
        One is read-only, overlaps itself or overlaps another one.
    """
    _check_destinations_apart(rows)


class Job:
    """The checked arguments of a call, in the form in which the kernel takes them. `check`: whether all blocks go to these rows."""

    def __init__(
        self,
        rows: Sequence[Rows],
        payloads: NDArray[np.uint64],
        first: NDArray[np.int64],
        tokens: NDArray[np.int64],
        used: NDArray[np.int64],
        used_name: str,
        threads: int | None,
        *,
        check: bool = True,
    ) -> None:
        for r in rows:
            if not isinstance(r, Rows):
                raise TypeError(f"rows must be Rows objects, not {type(r).__name__}")
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
        self.sums = np.zeros((blocks, len(rows)), np.uint32)
        self.empty = not (blocks and len(rows))
        if self.empty:
            return
        longest = int(self.tokens.max())
        for name, values in (("first", self.first), ("tokens", self.tokens), (used_name, self.used)):
            if values.min() < 0:
                raise ValueError(f"{name} must not be negative, but holds {values.min()}")
        size = payload_bytes(rows, longest)
        if size >= _ADDRESS_SPACE:
            raise ValueError(f"a payload of {longest} tokens would take {size} bytes, more than can be addressed")
        if check:
            check_room(rows, self.first, self.used, used_name)
        if not self.payloads.all() or int(self.payloads.max()) > _ADDRESS_SPACE * 2**9 - size:
            raise ValueError("payloads hold an address that is none, such as 0")
        if (self.tokens == longest).all():  # mostly; telling them apart takes ten times as long
            distinct, self.offset_row = self.tokens[:1], np.zeros(blocks, np.uint32)
        else:
            distinct, which = np.unique(self.tokens, return_inverse=True)
            self.offset_row = which.astype(np.uint32)
        row_bytes = np.array([r._row_bytes for r in rows], np.int64)
        per_row = np.array([r._tokens_per_row for r in rows], np.int64)
        segments = (distinct[:, None] // per_row * row_bytes + (SEGMENT_ALIGN - 1)) & -SEGMENT_ALIGN
        ends = np.cumsum(segments, axis=1)
        self.offsets = (ends - segments).astype(np.uint64)
        self._ends = ends[:, -1]
        self.rows = packed(rows)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each payload."""
        sizes: NDArray[np.int64] = self._ends[self.offset_row]
        return sizes

    def compare(self, rows: Sequence[Rows], expected: NDArray[np.uint32], failed: NDArray[np.int32]) -> None:
        """Note in `failed` each block's first stream whose sum isn't the expected one."""
        wrong = self.sums != expected
        if wrong.any():
            wrong[:, [r.skipped for r in rows]] = False
            failed[:] = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)

    @staticmethod
    def pointer(cdecl: str, array: NDArray[Any]) -> CData:
        return ffi.from_buffer(cdecl, array)


def packed(rows: Sequence[Rows]) -> CData:
    """Give rows as the kernel takes them, one behind the other. The memory lives as long as what is returned."""
    return ffi.from_buffer("kvs_rows[]", b"".join([r._packed for r in rows]))


def check_room(rows: Sequence[Rows], first: NDArray[np.int64], used: NDArray[np.int64], used_name: str) -> None:
    """Refuse, with ValueError, blocks that are out of step with rows, or beyond the arrays."""
    room: dict[int, int | None] = {}
    for r in rows:
        have = room.get(r._tokens_per_row)
        if r._array is not None and (have is None or r._capacity < have):
            room[r._tokens_per_row] = r._capacity
        else:
            room.setdefault(r._tokens_per_row, None)
    for per_row, capacity in room.items():
        if per_row > 1 and (bad := first % per_row != 0).any():
            i = int(bad.argmax())
            raise ValueError(f"first[{i}] is {first[i]}, not a multiple of the {per_row} tokens of a row")
        if capacity is None:
            continue
        # Each term is below 2**62 after the division or was refused, so that the sum can't wrap.
        start, count = first // per_row, used // per_row
        if (bad := (start > capacity) | (count > capacity - start)).any():
            i = int(bad.argmax())
            raise ValueError(
                f"block {i} has first {first[i]} and {used_name} {used[i]}, beyond the {capacity} rows "
                f"of {per_row} tokens that the arrays hold"
            )


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


# Geometries whose streams were found not to overlap although their extents do, such as keys and values interleaved
# in one array. The finding rests on addresses and strides alone, which the key holds, so that it can't go stale.
_apart: dict[tuple[bytes, tuple[int, ...]], None] = {}


def _check_destinations_apart(rows: Sequence[Rows]) -> None:
    spans = sorted((*r._destination(), i) for i, r in enumerate(rows) if r._array is not None)
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return
    paged = any(r._slots is not None for r in rows)
    key = (b"".join([r._packed for r in rows]), tuple(r._capacity for r in rows))
    if not paged and key in _apart:
        return
    open_spans: list[tuple[int, int]] = []
    for low, high, i in spans:
        open_spans = [(end, j) for end, j in open_spans if end > low]
        for _, j in open_spans:
            if _share(rows[i], rows[j]):
                raise ValueError(f"the destinations of streams {min(i, j)} and {max(i, j)} overlap")
        open_spans.append((high, i))
    if not paged:
        while len(_apart) >= 16:
            _apart.pop(next(iter(_apart)), None)
        _apart[key] = None


def _share(a: Rows, b: Rows) -> bool:
    """May two destinations share a byte? Yes in doubt."""
    assert a._array is not None and b._array is not None
    try:
        if not np.shares_memory(a._array, b._array, max_work=1 << 20):  # type: ignore[arg-type]  # stubs: -1 or 0 only
            return False
    except (np.exceptions.TooHardError, OverflowError):
        return True
    same_pages = a._packed[:16] == b._packed[:16] and a._packed[24:] == b._packed[24:]  # all but the slots' address
    if a._slots is None or b._slots is None or not same_pages:
        return True
    return bool(np.isin(a._slots.table, b._slots.table).any())
