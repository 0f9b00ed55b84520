"""What a forked child does with LMDB environments that were open when it was forked.

The child has copies of them that it must neither use nor close: their transactions' slots in the reader table are the parent's, and
closing a copy closes a descriptor of lock.mdb, which would drop every lock that LMDB holds in the child by then. So a copy is kept
for ever, untouched, and the child opens the file anew: with a descriptor, a map and reader slots of its own. POSIX locks aren't
inherited and the mutexes in lock.mdb know their holders by thread, so LMDB takes the child for what it is: another process.

py-lmdb refuses a file that is open in the process, which it knows by identities that a function of its own makes. For the length of
one open in a child, identities of inherited files are other ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import lmdb

from kvstore.errors import ForkedStoreError
from kvstore.records.constants import DATA_FILE, LMDB_LOCK_FILE

try:
    from lmdb import _envid as _identities
except ImportError:  # another version of py-lmdb: what was inherited can't be opened then
    _identities = None  # type: ignore[assignment]

__all__ = ["inherited", "opening_inherited", "remember"]

_File = tuple[int, int]  # device and inode

_files: set[_File] = set()  # that LMDB has, or had, open in this process
_environments: weakref.WeakSet[lmdb.Environment] = weakref.WeakSet()
_inherited: set[_File] = set()
_generation = 0  # how many forks lie between this process and the one that imported this
_patching = threading.Lock()
_plain: Callable[[Any, Any], tuple[Hashable, ...]] | None = getattr(_identities, "env_keys", None)


def _files_of(directory: str) -> set[_File]:
    found = set()
    for name in (DATA_FILE, LMDB_LOCK_FILE):
        with contextlib.suppress(OSError):
            there = os.stat(os.path.join(directory, name))  # looked at, never opened
            found.add((there.st_dev, there.st_ino))
    return found


def remember(directory: str, environment: lmdb.Environment | None = None) -> None:
    """Note what LMDB is about to open (a fork may fall into that), and what it has opened, for children that are forked later."""
    _files.update(_files_of(directory))
    if environment is not None:
        _environments.add(environment)


def inherited(directory: str) -> bool:
    """Whether the files in a directory were open when this process was forked."""
    return bool(_inherited) and not _inherited.isdisjoint(_files_of(directory))


@contextlib.contextmanager
def opening_inherited(directory: str) -> Iterator[None]:
    """Let py-lmdb open a file that was inherited, once, for the length of a `with` block. A second open is refused as ever.

    Raises
    ------
    ForkedStoreError
        When py-lmdb doesn't tell files apart as it is known to.
    """
    refused = ForkedStoreError(
        f"the store at {directory} was open when this process was forked, and this version of py-lmdb ({lmdb.__version__}) lets "
        "no child open it again: open stores after forking, or start workers with 'spawn' or 'forkserver'"
    )
    plain = _plain
    if plain is None:
        raise refused
    asked = False

    def keys(path: str | bytes, subdir: bool) -> tuple[Hashable, ...]:
        nonlocal asked
        asked = True
        return tuple(_own(key) for key in plain(path, subdir))

    with _patching:
        _identities.env_keys = keys
        try:
            yield
        except lmdb.Error as error:
            if not asked or "already open" in str(error):
                raise refused from error
            raise
        finally:
            _identities.env_keys = plain


def _own(key: Hashable) -> Hashable:
    """The identity of a file in this process: that of an inherited one is not the one which the copy of the parent's has."""
    if isinstance(key, tuple) and key[1:] in _inherited:
        return (*key, "forked", _generation)
    return key


def _after_fork_in_child() -> None:
    global _generation, _patching
    _generation += 1
    _patching = threading.Lock()
    _inherited.update(_files)
    _files.clear()
    if _plain is not None:
        _identities.env_keys = _plain  # another thread may just have been opening one
    for environment in list(_environments):
        # One reference that nobody gives back, so that neither the garbage collector nor the interpreter's end closes the copy.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment))
    _environments.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
