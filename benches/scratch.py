"""The scratch directory: gone afterwards, whatever happens, and if not then before the next run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benches.machine import MEMORY_FILE_SYSTEMS, file_system

__all__ = ["ScratchError", "scratch"]

_PREFIX = "scratch-"
_LOCK = ".in-use"


class ScratchError(Exception):
    """No scratch directory can be had; the message says why and what to do."""


@contextmanager
def scratch(directory: Path | None, default: Path) -> Iterator[Path]:
    """Make a directory in another that was asked for, or in `default` unless that is in memory.

    What a run that was killed has left there is removed first; a lock tells it from that of a run under way.

    Raises
    ------
    ScratchError
        None can be made there, or the default is on a file system in memory.
    """
    parent = directory or default
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if directory is None and file_system(parent)[0] in MEMORY_FILE_SYSTEMS:
            raise ScratchError(
                f"{parent.resolve()} is on {file_system(parent)[0]}, where nothing reaches a disk; say --dir to choose a directory "
                "(this one too, if you mean it)"
            )
        _sweep(parent)
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).resolve()
        lock = os.open(made / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ScratchError(f"no scratch directory can be made in {parent}: {error.strerror}; choose one with --dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
