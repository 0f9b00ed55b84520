"""One environment for each store file in a process, however often it is opened, and what happens to it on a fork."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from kvstore.env.environment import Environment
from kvstore.env.opening import open_environment
from kvstore.errors import CapError, ForkedStoreError
from kvstore.records.constants import DATA_FILE

__all__ = ["acquire_environment", "open_handles", "release_environment", "retain_environment"]


@dataclass
class _Shared:
    environment: Environment
    handles: int


# LMDB forbids opening a file twice in a process; keyed by device and inode, which every path to it has in common.
_open: dict[tuple[int, int], _Shared] = {}
# Files that were open when this process was forked. LMDB must not open them here: its handle from before the fork can't be
# closed without clearing the parent's reader slots.
_inherited: set[tuple[int, int]] = set()
_opening = threading.Lock()  # one opener at a time; it may wait for other processes, and leases must not wait with it
_guard = threading.RLock()  # re-entrant: the last view of a lease may die in a garbage collection anywhere


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        there = os.stat(os.path.join(os.path.realpath(os.fspath(path)), DATA_FILE))
    except OSError:
        return None
    return there.st_dev, there.st_ino


def acquire_environment(
    path: str | os.PathLike[str], *, max_bytes: int | None, lock_timeout: float, any_owner: bool
) -> Environment:
    """Open a store, or take another handle of one that is open in this process. `release_environment` gives it back."""
    with _opening:
        key = _identity(path)
        if key is not None and key in _inherited:
            raise ForkedStoreError(
                f"the store at {os.fspath(path)} was open when this process was forked, and LMDB opens a file once in a process; "
                "open stores after forking, or start workers with 'spawn'"
            )
        with _guard:
            shared = _open.get(key) if key is not None else None
            if shared is not None:
                cap = shared.environment.record.cap
                if max_bytes is not None and max_bytes != cap:
                    raise CapError(
                        f"the store is open with a cap of {cap} bytes, max_bytes is {max_bytes}; "
                        "open it with max_bytes=None, or change the cap with Store.resize"
                    )
                shared.handles += 1
                return shared.environment
        environment = open_environment(path, max_bytes=max_bytes, lock_timeout=lock_timeout, any_owner=any_owner)
        with _guard:
            _open[environment.file_identity] = _Shared(environment, 1)
        return environment


def retain_environment(environment: Environment) -> None:
    """Take one more handle of an open environment: a lease keeps the file open that its views point into."""
    with _guard:
        environment.check_open()
        _open[environment.file_identity].handles += 1


def release_environment(environment: Environment) -> None:
    """Give a handle back; the last one closes the environment. Does nothing in a forked child."""
    with _guard:
        shared = _open.get(environment.file_identity)
        if shared is None or shared.environment is not environment:
            return
        shared.handles -= 1
        if not shared.handles:
            del _open[environment.file_identity]
            environment.close()


def open_handles(path: str | os.PathLike[str]) -> int:
    """How many handles this process has on the store at a path."""
    with _guard:
        shared = _open.get(_identity(path) or (0, 0))
        return shared.handles if shared is not None else 0


def _after_fork_in_child() -> None:
    global _guard, _opening
    _guard, _opening = threading.RLock(), threading.Lock()
    for shared in _open.values():
        shared.environment.after_fork()
    _inherited.update(_open)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
