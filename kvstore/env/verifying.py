"""Checking the structure of a data file before LMDB opens it: a damaged tree can kill whoever walks it."""

from __future__ import annotations

import errno
import os

import lmdb
import lmdb.verify

from kvstore.records.constants import PAYLOAD_ALIGN

__all__ = ["verify_file"]

_FLAGS = slice(10, 12)  # in the header of a page of LMDB 0.9: mp_flags
_P_OVERFLOW = 0x04


class _Sectors:
    """A file whose blocks may have bad sectors behind their first: the verifier reads a value's first page whole, and looks at
    16 bytes of it. What a payload has lost is found by who restores it, and costs that block's sessions, not the store.

    A page of the tree, which LMDB reads through its map, must be readable.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0

    def seek(self, offset: int) -> int:
        """As of a file."""
        self._at = offset
        return offset

    def read(self, length: int) -> bytes:
        """As of a file, but for a page that begins a value: sectors of it that can't be read are zeros."""
        at, self._at = self._at, self._at + length
        try:
            return self._fully(at, length)
        except OSError:
            if length <= PAYLOAD_ALIGN:
                raise
            first = self._fully(at, PAYLOAD_ALIGN)
            if len(first) < PAYLOAD_ALIGN or not int.from_bytes(first[_FLAGS], "little") & _P_OVERFLOW:
                raise
            return first + b"".join(self._sector(at + skip) for skip in range(PAYLOAD_ALIGN, length, PAYLOAD_ALIGN))

    def _fully(self, at: int, length: int) -> bytes:
        """Read on where a read ends early: before a bad sector, which is an error then, or at the end of the file."""
        parts = []
        while length and (part := os.pread(self._fd, length, at)):
            parts.append(part)
            at, length = at + len(part), length - len(part)
        return b"".join(parts)

    def _sector(self, at: int) -> bytes:
        try:
            return self._fully(at, PAYLOAD_ALIGN)
        except OSError:
            return bytes(PAYLOAD_ALIGN)


def verify_file(data: str) -> list[str]:
    """Check the structure of a data file that nobody writes to, without LMDB. Returns the problems found.

    Raises OSError when this process has too many files open.
    """
    try:
        try:
            problems = lmdb.verify.verify(data, subdir=False)  # type: ignore[no-untyped-call]  # not typed
        except OSError:
            # that function opens the file itself, so one bad sector in a payload would be the end of the store
            with open(data, "rb", buffering=0) as file:
                verifier = lmdb.verify._Verifier(_Sectors(file.fileno()), os.fstat(file.fileno()).st_size)  # type: ignore[no-untyped-call]
                problems = verifier.verify()  # type: ignore[no-untyped-call]
        return [str(problem) for problem in problems]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return [f"cannot be verified: {error}"]
    except (lmdb.verify.VerifyError, ValueError, IndexError, AttributeError) as error:
        return [f"cannot be verified: {error}"]
