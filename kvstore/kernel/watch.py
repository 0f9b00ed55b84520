"""Watching LMDB's map of a file, so that a page that can't be read is an error and not the end of the process."""

from __future__ import annotations

import os

from kvstore.kernel._native import lib

__all__ = ["MapWatch", "watch_here"]


class MapWatch:
    """Lets LMDB go on where a page of its map can't be read: see ``kvs_watch`` in ``native/kvs_kernel.h``.

    While it lasts, the process's handler for SIGBUS is kvstore's, which passes on what isn't meant for it. One that somebody
    installs over it has to pass on what isn't meant for him; where he doesn't, the process ends as it would without a watch.

    Parameters
    ----------
    address, length : int
        The map: whole pages of the system.
    page : int
        Bytes of LMDB's pages.
    reader, writer : int
        Descriptors of the file, and of LMDB's that it writes by (-1 if that isn't known): with the first page that is lost the
        second becomes a copy of the first. Stay the caller's; `close` before they are closed or the map ends.

    Raises
    ------
    OSError
        As many maps as there can be are watched already.
    """

    __slots__ = ("_number", "_pid")

    def __init__(self, address: int, length: int, *, page: int, reader: int, writer: int) -> None:
        self._number = -1
        self._pid = os.getpid()
        number = lib.kvs_watch(address, length, page, reader, writer)
        if number < 0:
            raise OSError(f"{lib.KVS_MAX_WATCHED} stores are open in this process, and no more can be watched for bad pages")
        self._number = number

    @property
    def lost(self) -> int:
        """How many pages could not be read so far. 0 after `close`, and in a forked child."""
        return lib.kvs_watch_lost(self._number) if self._number >= 0 and self._pid == os.getpid() else 0

    def close(self) -> None:
        """End it. Nobody may be in a call of LMDB's on the map. Idempotent; does nothing in a forked child, which has none."""
        number, self._number = self._number, -1
        if number >= 0 and self._pid == os.getpid():
            lib.kvs_watch_end(number)


def watch_here() -> None:
    """Let the calling thread be helped as well: a fault ends the process if its signal is blocked, whatever is watched."""
    lib.kvs_watch_here()
