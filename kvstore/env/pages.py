"""The first pages of an LMDB file: written by us to choose the page size, read by us before LMDB is let near the file.

LMDB keeps the page size that it finds in a file, and py-lmdb has no option to choose one, so a new store starts as a file
of two meta pages. The layout is that of MDB_meta in LMDB 0.9's mdb.c.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from kvstore.env.damaged import DamagedFile, PageReader, free_pages, read_metas
from kvstore.errors import NotAStoreError, StoreDamagedError

__all__ = ["FileFacts", "read_facts", "what_to_do", "write_empty"]

_LMDB_MAGIC, _LMDB_DATA_VERSION = 0xBEEFC0DE, 1
_P_META = 0x08
_NO_PAGE = (1 << 64) - 1
_FREE_FLAGS, _MAIN_FLAGS = 0x08, 0  # integer keys; LMDB aborts the process where a damaged one says that keys have several values
_PAGE = struct.Struct("<QHHHH")  # page number, padding, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, fixed address, map size
_DB = struct.Struct("<IHHQQQQQ")  # padding (page size in the first), flags, depth, branch, leaf, overflow, entries, root
_END = struct.Struct("<QQ")  # last page, transaction
_FIRST_DB = _PAGE.size + _META.size
_LAST = _FIRST_DB + 2 * _DB.size


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the meta pages say of a file.

    `last_page` and `transaction` are those of the newer meta page.
    """

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int
    file_bytes: int


def write_empty(path: str, *, page_bytes: int, map_bytes: int) -> None:
    """Write an empty LMDB 0.9 file of this page size, durably. The file must not exist; mode 0600."""

    def meta(page: int) -> bytes:
        data = _PAGE.pack(page, 0, _P_META, 0, 0) + _META.pack(_LMDB_MAGIC, _LMDB_DATA_VERSION, 0, map_bytes)
        data += _DB.pack(page_bytes, _FREE_FLAGS, 0, 0, 0, 0, 0, _NO_PAGE) + _DB.pack(0, _MAIN_FLAGS, 0, 0, 0, 0, 0, _NO_PAGE)
        return (data + _END.pack(1, 0)).ljust(page_bytes, b"\0")

    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, meta(0) + meta(1))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_facts(path: str) -> FileFacts:
    """Read the meta pages of a data file without LMDB.

    Raises
    ------
    NotAStoreError
        When the file is no LMDB file of a format that a store has.
    StoreDamagedError
        When it is empty, or shorter than what it holds needs: touching it would kill the process.
    """
    with open(path, "rb", buffering=0) as file:
        first = file.read(_LAST + _END.size)
        if not first:
            raise StoreDamagedError(f"{path} is empty: the store was truncated; {what_to_do(path)}")
        found = _parse(first)
        if found is None:
            raise NotAStoreError(f"{path} does not begin like the data file of a store; choose another directory")
        page_bytes, map_bytes, last_page, transaction = found
        file.seek(page_bytes)
        raw = file.read(_LAST + _END.size)
        second = _parse(raw)
        if not _has_our_flags(first) or (second is not None and not _has_our_flags(raw)):
            raise NotAStoreError(f"the meta pages of {path} have flags that no store's have; choose another directory")
        # Looked at last: a process that is writing lets the file grow first, and then says so in a meta page.
        size = os.fstat(file.fileno()).st_size
    if second is not None and second[3] > transaction:
        map_bytes, last_page, transaction = second[1:]
    if size < (last_page + 1) * page_bytes and not _holds_nothing_behind(path, size):
        raise StoreDamagedError(
            f"{path} has {size} bytes, its last page ends at {(last_page + 1) * page_bytes}: the store was truncated; "
            f"{what_to_do(path)}"
        )
    return FileFacts(page_bytes, map_bytes, last_page, transaction, size)


def _holds_nothing_behind(path: str, size: int) -> bool:
    """Whether all pages that a file lacks are free ones. LMDB never writes a page that one transaction takes and gives back: where
    that is the last one, the file ends before it until something else is put there.
    """
    file = DamagedFile(path)
    try:
        for meta in read_metas(file)[:1]:
            free = free_pages(PageReader(file, meta.page_bytes, meta.last_page), meta.free)
            return free is not None and free.issuperset(range(size // meta.page_bytes, meta.last_page + 1))
    finally:
        file.close()
    return False


def what_to_do(path: str | os.PathLike[str]) -> str:
    """What an error of a damaged data file tells people to do."""
    return f"run `python -m kvstore repair {os.path.dirname(path)}`, which keeps what verifies, or move it away"


def _has_our_flags(raw: bytes) -> bool:
    """Whether a meta page gives its two databases the flags that they have in a store."""
    free, main = _DB.unpack_from(raw, _FIRST_DB)[1], _DB.unpack_from(raw, _FIRST_DB + _DB.size)[1]
    return (free, main) == (_FREE_FLAGS, _MAIN_FLAGS)


def _parse(raw: bytes) -> tuple[int, int, int, int] | None:
    if len(raw) < _LAST + _END.size:
        return None
    magic, version, _, map_bytes = _META.unpack_from(raw, _PAGE.size)
    page_bytes = _DB.unpack_from(raw, _FIRST_DB)[0]
    if magic != _LMDB_MAGIC or version != _LMDB_DATA_VERSION:
        return None
    if not 4096 <= page_bytes <= 32768 or page_bytes & (page_bytes - 1):
        return None
    last_page, transaction = _END.unpack_from(raw, _LAST)
    return page_bytes, map_bytes, last_page, transaction
