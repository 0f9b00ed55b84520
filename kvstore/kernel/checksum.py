"""CRC32C of buffers, on the fastest path of the processor or on a named one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.kernel._native import ffi, lib

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer  # in collections.abc since Python 3.12

    # numpy declares its arrays to be buffers only from Python 3.12 on.
    BufferLike: TypeAlias = Buffer | np.ndarray[Any, np.dtype[Any]]

__all__ = ["crc32c", "crc32c_paths", "crc32c_with", "force_crc32c"]

_crc32c = lib.kvs_crc32c


def crc32c(data: BufferLike, seed: int = 0) -> int:
    """Return the CRC32C of a buffer.

    Safe to call from any thread; the GIL is released while it runs, so nobody may write to `data` meanwhile.

    Parameters
    ----------
    data : buffer
        Bytes, or anything C-contiguous with the buffer protocol, such as an array or a memoryview.
    seed : int
        The result for the bytes that precede these ones, to continue from; 0 to start.

    Returns
    -------
    int
        In [0, 2**32).

    Raises
    ------
    OverflowError
        `seed` isn't in [0, 2**32).
    TypeError, ValueError, BufferError
        `data` has no buffer, or not a contiguous one.
    """
    if type(data) is bytes:
        return _crc32c(seed, data, len(data))
    view = ffi.from_buffer("char[]", data)
    return _crc32c(seed, view, len(view))


def crc32c_paths() -> tuple[str, ...]:
    """Return the names of the paths that this processor can run, fastest first.

    The last one is ``"portable"``, which runs everywhere and is the oracle for the others.
    """
    names: list[str] = []
    while (name := lib.kvs_crc32c_path(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)


def crc32c_with(path: str, data: BufferLike, seed: int = 0) -> int:
    """Return the CRC32C of a buffer as computed on one path; otherwise like `crc32c`.

    Raises
    ------
    ValueError
        `path` isn't one of `crc32c_paths()`.
    """
    view = ffi.from_buffer("char[]", data)
    result = ffi.new("uint32_t *")
    if lib.kvs_crc32c_with(path.encode(), seed, view, len(view), result):
        raise ValueError(f"no such CRC32C path: {path!r}; this processor has {crc32c_paths()}")
    return result[0]


def force_crc32c(path: str | None) -> None:
    """Make all later calls of the kernel, in all threads, use one path; None goes back to the fastest.

    For tests and benchmarks.

    Raises
    ------
    ValueError
        `path` isn't one of `crc32c_paths()`.
    """
    if lib.kvs_crc32c_force(ffi.NULL if path is None else path.encode()):
        raise ValueError(f"no such CRC32C path: {path!r}; this processor has {crc32c_paths()}")
