"""What becomes of a store whose file can't be read where LMDB reads it: under its own map.

The kernel puts a page in the place of one that the disk can't deliver, or that was cut off, and counts it (`MapWatch`). LMDB
then comes to an error, or to a record that fails its checks. What it would write is not to be trusted any more: pages are
copied from others. So nothing is committed from then on.
"""

from __future__ import annotations

import logging
import os
import threading

import lmdb
import numpy as np

from kvstore.env.engine import writer_of
from kvstore.env.transactions import Databases, translated
from kvstore.errors import KVStoreError, StoreDamagedError
from kvstore.kernel import MapWatch
from kvstore.records.meta import FORMAT_KEY

__all__ = ["MapFaults"]

_log = logging.getLogger("kvstore")

_READ_AT_ONCE = 4 << 20


class MapFaults:
    """What LMDB's map of a store's file has lost while it was open. Thread-safe, but for `close` and `moved`.

    Parameters
    ----------
    path : str
        The store, for messages.
    environment : lmdb.Environment
        LMDB's environment of it, without a transaction of this thread's.
    db : Databases
        Its databases.
    page_bytes : int
        Bytes of a page of LMDB.
    fd : int
        A descriptor of the data file that only reads. Stays the caller's, and open until `close`.
    """

    def __init__(self, path: str, environment: lmdb.Environment, db: Databases, page_bytes: int, fd: int) -> None:
        self._path = path
        self._environment = environment
        self._db = db
        self._page_bytes = page_bytes
        self._fd = fd
        self._pid = os.getpid()
        self._size = os.fstat(fd).st_size
        self._growing = threading.Lock()
        self._shortened = False
        self._reported = False
        self._lost = 0  # by maps that were given up
        self._watch = self._begin()

    def _begin(self) -> MapWatch | None:
        try:
            address, length = _find_map(self._environment, self._db)
            return MapWatch(address, length, page=self._page_bytes, reader=self._fd, writer=self._writer())
        except (KVStoreError, OSError, ValueError) as error:
            _log.warning("a page of %s that can't be read will end the process: %s", self._path, error)
            return None

    def _writer(self) -> int:
        """LMDB's descriptor. What it has begun to commit when a page is lost may have been read from it where that isn't known."""
        number = writer_of(self._environment)
        if number < 0:
            _log.debug("it isn't plain by which descriptor LMDB writes %s", self._path)
        return number

    @property
    def lost(self) -> int:
        """Pages that could not be read so far."""
        return self._lost + (self._watch.lost if self._watch is not None else 0)

    @property
    def met(self) -> bool:
        """Whether pages were lost, or the file has been cut off: what isn't found may have been there, from then on."""
        return self._cut_off() or self.lost > 0

    def _cut_off(self) -> bool:
        """A forked child doesn't look: its copy of the descriptor is closed, and whatever it does with the store is refused."""
        if self._shortened or self._pid != os.getpid():
            return self._shortened
        known = self._size  # before the other: the file grows meanwhile, and only ever grows
        size = os.fstat(self._fd).st_size
        if size < known:
            self._shortened = True
        elif size > known:
            with self._growing:  # who has looked earlier, and comes later, takes nothing back
                self._size = max(self._size, size)
        return self._shortened

    def check_length(self) -> None:
        """Refuse even to read, with StoreDamagedError, where the file was cut off.

        What lies behind its end in its last page reads as zeros, and so does what lies in front of whatever is written behind it.
        LMDB ends the process where it meets zeros in a tree.
        """
        if self._cut_off():
            raise self.error()

    def look(self) -> None:
        """Take note of the file's length, after a commit that may have made it longer: of what is cut off of that as well."""
        self._cut_off()

    def check(self) -> None:
        """Refuse to write, with StoreDamagedError, where something was lost."""
        if self.met:
            raise self.error()

    def read_all(self) -> None:
        """Read the whole file, ahead of something that reads all of it through the map.

        Raises
        ------
        StoreDamagedError
            With the offset, where it can't be read.
        """
        self.check()
        buffer = bytearray(_READ_AT_ONCE)
        at, end = 0, os.fstat(self._fd).st_size
        try:
            while at < end and (got := os.preadv(self._fd, [buffer], at)):
                at += got
        except OSError as error:
            raise StoreDamagedError(
                f"the data file in {self._path} cannot be read at {at} or up to {len(buffer)} bytes behind it: {error.strerror}; "
                "`python -m kvstore repair` keeps what can be read"
            ) from error

    def error(self) -> StoreDamagedError:
        """The error for what was met: what happened, and what to do."""
        if not self._reported:
            self._reported = True
            _log.error("%s", self._what())
        return StoreDamagedError(f"{self._what()}: close the store in every process, look at the disk, `python -m kvstore repair`")

    def _what(self) -> str:
        if self._shortened:
            return f"the data file in {self._path} was cut off while the store was open; reading and writing are refused"
        return f"{self.lost} pages of the index in {self._path} could not be read; writing is refused"

    def moved(self) -> None:
        """Look for the map again, after LMDB has mapped the file anew. `close` comes before that."""
        self._watch = self._begin()

    def close(self) -> None:
        """Stop watching, before the map ends. Nobody may be in a call of LMDB's. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._lost += watch.lost
            watch.close()


def _find_map(environment: lmdb.Environment, db: Databases) -> tuple[int, int]:
    """Where LMDB has mapped the file: address and length. LMDB doesn't tell; so it's the map that one of its records lies in."""
    with translated(), environment.begin(buffers=True) as txn:
        record = txn.get(FORMAT_KEY, db=db.meta)
        if record is None:
            raise ValueError("the store's format is not to be found in LMDB's map")
        inside = int(np.frombuffer(record, np.uint8).__array_interface__["data"][0])
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                bounds, rights, offset = line.split(maxsplit=3)[:3]
                low, high = (int(bound, 16) for bound in bounds.split(b"-"))
                if low <= inside < high:
                    if rights != b"r--s" or int(offset, 16):
                        raise ValueError(f"LMDB's map is not as expected: {line.decode(errors='replace').strip()}")
                    return low, high - low
    raise ValueError("LMDB's map is not among the process's maps")
