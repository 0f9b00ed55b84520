"""What a killed process leaves of a store that it was creating or resizing, and who removes it: the next exclusive opener."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from kvstore.records.constants import DATA_FILE, LMDB_LOCK_FILE, NEW_DATA_FILE, OPEN_LOCK_FILE, WRITE_LOCK_FILE

__all__ = ["beside_of", "remove_beside", "remove_copy", "remove_leftovers"]

_log = logging.getLogger("kvstore")

_IN_COPY = {DATA_FILE, LMDB_LOCK_FILE, OPEN_LOCK_FILE, WRITE_LOCK_FILE, NEW_DATA_FILE}  # all that is ever put there


def beside_of(home: Path) -> Path:
    """The directory beside a store in which a resize writes the store anew."""
    return home.parent / f".{home.name}.resize"


def remove_leftovers(home: Path) -> None:
    """Remove what a killed creation or resize has left. The caller holds the store exclusively, and its data file is in place."""
    with contextlib.suppress(OSError):
        (home / NEW_DATA_FILE).unlink()
    remove_beside(home)


def remove_beside(home: Path) -> None:
    """Remove the copy that a killed resize has left beside a store; nothing that isn't certainly one."""
    remove_copy(home, beside_of(home), "resize")


def remove_copy(home: Path, beside: Path, purpose: str) -> None:
    """Remove the copy of a store that a killed resize or repair has left beside it; nothing that isn't certainly one.

    So a directory, no link, of the user whom the store's data file belongs to, closed to others, with nothing in it but the files
    of such a copy. What is something else stays, and stays whole.
    """
    try:
        there = os.lstat(beside)
        if not stat.S_ISDIR(there.st_mode) or stat.S_IMODE(there.st_mode) & 0o077:
            return
        if there.st_uid not in (os.geteuid(), os.stat(home / DATA_FILE).st_uid):
            return
        with os.scandir(beside) as entries:
            found = list(entries)
        if any(entry.name not in _IN_COPY or not entry.is_file(follow_symlinks=False) for entry in found):
            _log.warning("%s is not the copy of a killed %s: it is left alone", beside, purpose)
            return
        for entry in found:
            os.unlink(entry.path)
        beside.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("what a killed %s left at %s can't be removed: %s", purpose, beside, error.strerror)
    else:
        _log.info("removed what a %s left at %s", purpose, beside)
