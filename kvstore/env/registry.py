"""One environment for each store file in a process, however often it is opened, and what happens to it on a fork."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from kvstore.env.environment import Environment
from kvstore.env.opening import locked_files, open_environment
from kvstore.errors import CapError, StoreBusyError, StoreClosedError
from kvstore.records.constants import DATA_FILE

__all__ = ["acquire_environment", "exclusive_environment", "exclusive_files"]

# LMDB forbids opening a file twice in a process; keyed by device and inode, which every path to it has in common.
_open: dict[tuple[int, int], Environment] = {}
_opening = threading.Lock()  # one opener at a time
_exclusive: set[tuple[int, int]] = set()  # files that are being resized or repaired by this process


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        there = os.stat(os.path.join(os.path.realpath(os.fspath(path)), DATA_FILE))
    except OSError:
        return None
    return there.st_dev, there.st_ino


def acquire_environment(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None,
    lock_timeout: float,
    any_owner: bool = False,
    any_filesystem: bool = False,
) -> Environment:
    """Open a store, or count one more use of one that is open in this process. Its `release` gives the use back."""
    with _opening:
        key = _identity(path)
        if key is not None and key in _exclusive:
            raise StoreBusyError(
                f"the store at {os.fspath(path)} is just being resized or repaired by this process; try again later"
            )
        known = _open.get(key) if key is not None else None
        if known is not None and _share(known, max_bytes, lock_timeout):
            return known
        environment = open_environment(
            path, max_bytes=max_bytes, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem
        )
        _forget_closed()
        _open[environment.file_identity] = environment
        return environment


@contextlib.contextmanager
def exclusive_environment(
    path: str | os.PathLike[str],
    *,
    lock_timeout: float,
    any_owner: bool = False,
    any_filesystem: bool = False,
    purpose: str = "resize",
) -> Iterator[Environment]:
    """A store that nobody else has open, in this process or another, for the length of a `with` block. Closed afterwards.

    Parameters
    ----------
    purpose : str
        What it is for, in the messages.

    Raises
    ------
    StoreBusyError
        When it is open somewhere, or was changed while this waited.
    """
    with _opening:
        key = _identity(path)
        known = _open.get(key) if key is not None else None
        if (known is not None and not known.gone.is_set()) or key in _exclusive:
            raise StoreBusyError(
                f"{os.fspath(path)} is open in this process; end its handles, leases, views and cascades before you {purpose} it"
            )
        environment = open_environment(
            path, max_bytes=None, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem
        )
        _exclusive.add(environment.file_identity)
    try:
        if not environment.exclusive(lock_timeout):
            raise StoreBusyError(f"{environment.path} is open in another process; close it everywhere before you {purpose} it")
        if not environment.unchanged():
            raise StoreBusyError(f"{environment.path} was resized or repaired by another process meanwhile; look at it again")
        yield environment
    finally:
        try:
            environment.release()
        finally:
            _exclusive.discard(environment.file_identity)


@contextlib.contextmanager
def exclusive_files(
    path: str | os.PathLike[str], *, lock_timeout: float, any_owner: bool = False, any_filesystem: bool = False, purpose: str
) -> Iterator[None]:
    """The files of a store that nobody has open, in this process or another, and that LMDB is kept away from meanwhile.

    Raises
    ------
    StoreBusyError, StoreOwnerError, SharingError
    """
    with _opening:
        key = _identity(path)
        known = _open.get(key) if key is not None else None
        if (known is not None and not known.gone.is_set()) or key in _exclusive:
            raise StoreBusyError(
                f"{os.fspath(path)} is open in this process; end its handles, leases, views and cascades before you {purpose} it"
            )
        if key is not None:
            _exclusive.add(key)
    try:
        with locked_files(
            os.path.realpath(os.fspath(path)),
            lock_timeout=lock_timeout,
            any_owner=any_owner,
            any_filesystem=any_filesystem,
            purpose=purpose,
        ):
            yield
    finally:
        if key is not None:
            _exclusive.discard(key)


def _share(known: Environment, max_bytes: int | None, lock_timeout: float) -> bool:
    """Count a use of an environment that is open; False when it is closed, having waited until it really is."""
    try:
        known.retain()
    except StoreClosedError:
        if not known.gone.wait(lock_timeout):
            raise StoreBusyError(f"the store at {known.path} is just being closed by another thread; try again") from None
        return False
    cap = known.record.cap
    if max_bytes is not None and max_bytes != cap:
        known.release()
        raise CapError(
            f"the store is open with a cap of {cap} bytes, max_bytes is {max_bytes}; "
            "open it with max_bytes=None, or change the cap with Store.resize (python -m kvstore resize)"
        )
    return True


def _forget_closed() -> None:
    for key in [key for key, environment in _open.items() if environment.gone.is_set()]:
        del _open[key]


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()
    _open.clear()
    _exclusive.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
