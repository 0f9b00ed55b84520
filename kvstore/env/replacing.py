"""Putting a new data file in the place of a damaged one, which is moved aside: beside the store, never into its directory.

At every instant the store's directory has a data file: the damaged one until the new one takes its name. What a process
that was killed has left beside the store is removed by the next one that repairs it.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import time
from pathlib import Path

from kvstore.env.leftovers import remove_copy
from kvstore.errors import StoreFullError, StoreOwnerError
from kvstore.records.constants import DATA_FILE

__all__ = ["clear_leftovers", "give_to_owner", "make_beside", "remove_new", "replace_file"]

_log = logging.getLogger("kvstore")

_ROOM_TO_SPARE = 64 << 20


def _beside(home: Path) -> Path:
    """Where the new store is written while a store is repaired."""
    return home.parent / f".{home.name}.repair"


def remove_new(home: Path) -> None:
    """Remove the new store that is being written, or what is left of it."""
    remove_copy(home, _beside(home), "repair")


def clear_leftovers(home: Path) -> None:
    """Remove what a killed repair has left: its half-written store, and a second name of a file that is in its place still."""
    remove_new(home)
    for aside in home.parent.glob(f"{glob.escape(home.name)}.damaged-*"):
        with contextlib.suppress(OSError):
            if (aside / DATA_FILE).samefile(home / DATA_FILE):
                (aside / DATA_FILE).unlink()
        with contextlib.suppress(OSError):
            aside.rmdir()  # which is refused where there is anything in it


def make_beside(home: Path, needed: int) -> Path:
    """Name the directory of the new store, having seen that there is room for `needed` bytes.

    Raises
    ------
    StoreFullError, StoreOwnerError
    """
    if home.stat().st_dev != home.parent.stat().st_dev:
        raise StoreFullError(
            f"{home} is a mount point: repairing writes the store anew beside it, which is another file system; "
            "move the store into a directory of its own"
        )
    if not os.access(home.parent, os.W_OK | os.X_OK):
        raise StoreOwnerError(
            f"repairing writes the store anew beside it, and {home.parent} can't be written; check its permissions"
        )
    free = shutil.disk_usage(home.parent).free
    if free < needed + _ROOM_TO_SPARE:
        raise StoreFullError(
            f"repairing writes the store anew beside {home}: it takes {needed + _ROOM_TO_SPARE} bytes, {free} are free there"
        )
    beside = _beside(home)
    if os.path.lexists(beside):
        raise StoreOwnerError(f"repairing writes the store anew at {beside}, where something else is: move it away")
    return beside


def replace_file(home: Path, new: Path) -> Path:
    """Give the store's damaged data file a name in a directory of its own, and put `new` in its place. Both durably.

    The caller holds the store exclusively. Returns the directory.
    """
    aside = _make_aside(home)
    data = home / DATA_FILE
    try:
        os.link(data, aside / DATA_FILE)
    except OSError as error:
        aside.rmdir()
        raise StoreOwnerError(
            f"{data} can't be given a second name in {aside}, which is how it is moved aside without an instant in which there "
            f"is no store: {error.strerror}; copy the store to a file system with hard links and repair it there"
        ) from error
    for directory in (aside, home.parent):
        _sync(directory)
    give_to_owner(new, data)
    new.replace(data)
    for directory in (home, home.parent):
        _sync(directory)
    return aside


def give_to_owner(new: Path, old: Path) -> None:
    """Give a new file to whom the old one belongs, who could not open his store otherwise. Only root can, and only root has to."""
    there = os.stat(old, follow_symlinks=False)
    if os.geteuid() == 0 and (there.st_uid, there.st_gid) != (0, 0):
        try:
            os.chown(new, there.st_uid, there.st_gid, follow_symlinks=False)
        except OSError as error:  # in a user namespace that doesn't know him
            _log.warning("the new file of %s can't be given to user %d: %s", old.parent, there.st_uid, error.strerror)


def _make_aside(home: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for count in range(100):
        aside = home.parent / f"{home.name}.damaged-{stamp}{f'-{count}' if count else ''}"
        with contextlib.suppress(FileExistsError):
            aside.mkdir(mode=0o700)
            return aside
    raise StoreOwnerError(f"cannot make a directory for the damaged file beside {home}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
