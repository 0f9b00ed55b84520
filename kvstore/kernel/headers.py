"""Many small records at once: headers read from a file and checked, and checksums of records that lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.kernel._native import ffi, lib

__all__ = ["crc32c_each", "read_headers"]

_MAX_PREFIX: int = lib.KVS_MAX_PREFIX


def crc32c_each(records: bytes, length: int, *, skip: int = 0) -> npt.NDArray[np.uint32]:
    """Compute the CRC32C of each of the records that lie one behind another.

    Safe to call from any thread; the GIL is released.

    Parameters
    ----------
    records : bytes
        A whole number of records.
    length : int
        Bytes of one record, at least 1.
    skip : int
        Bytes at the start of each that are left out, at most `length`.

    Returns
    -------
    ndarray of uint32, shape (records,)

    Raises
    ------
    ValueError
        The lengths don't fit one another.
    """
    if length < 1 or not 0 <= skip <= length or len(records) % length:
        raise ValueError(f"{len(records)} bytes are no records of {length} bytes of which {skip} are left out")
    sums = np.empty(len(records) // length, np.uint32)
    lib.kvs_crc32c_each(
        ffi.from_buffer("char[]", records), sums.size, length, skip, ffi.from_buffer("uint32_t[]", sums, require_writable=True)
    )
    return sums


def read_headers(
    fd: int, offsets: npt.NDArray[np.int64], expected: npt.NDArray[Any], sums: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """Read headers from a file and check each against what it has to begin with and against its own CRC32C.

    A header is what is expected, then checksums, then the CRC32C of all before it. It is read, not mapped, so what the disk
    can't deliver is a status and no signal. What isn't in the page cache is asked for all at once. Safe to call from any
    thread; the GIL is released.

    Parameters
    ----------
    fd : int
        Descriptor of a file open for reading. Stays the caller's.
    offsets : int64 array of shape (headers,)
        Where each header lies in the file; not negative.
    expected : contiguous array of shape (headers,), any dtype of 1 to 256 bytes
        The first bytes of each.
    sums : int
        Checksums in each.

    Returns
    -------
    found : uint32 array of shape (headers, sums)
        The checksums of each; undefined where its status isn't 0.
    status : int32 array of shape (headers,)
        0 for a whole header; EBADMSG where the file ends or something else lies there; or the errno of the read.

    Raises
    ------
    TypeError, ValueError
        The arguments aren't as described.
    """
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or not isinstance(expected, np.ndarray):
        raise TypeError("offsets must be an int64 array, and expected an array")
    if offsets.ndim != 1 or expected.shape != offsets.shape or not offsets.flags.c_contiguous or not expected.flags.c_contiguous:
        raise ValueError(f"offsets {offsets.shape} and expected {expected.shape} must be contiguous, 1-D and of one length")
    if not 1 <= expected.itemsize <= _MAX_PREFIX or not 0 <= sums < 1 << 24 or expected.dtype.hasobject:
        raise ValueError(f"{expected.itemsize} bytes in front of {sums} checksums: expected 1 to {_MAX_PREFIX} bytes")
    found = np.empty((offsets.size, sums), "<u4")
    status = np.empty(offsets.size, np.int32)
    lib.kvs_read_headers(
        fd,
        offsets.size,
        ffi.from_buffer("int64_t[]", offsets),
        ffi.from_buffer("char[]", expected.view(np.uint8)),
        expected.itemsize,
        sums,
        ffi.from_buffer("uint32_t[]", found, require_writable=True),
        ffi.from_buffer("int32_t[]", status, require_writable=True),
    )
    return found.astype(np.uint32, copy=False), status
