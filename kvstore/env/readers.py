"""Who reads the store now, in any process: LMDB's table of readers. A reader pins the pages that were freed since it began."""

from __future__ import annotations

import time
from collections.abc import Callable

import lmdb

from kvstore.env.transactions import translated

__all__ = ["Readers"]

_PAUSE = 0.005  # seconds between two looks


class Readers:
    """The readers of one environment. Thread-safe.

    Parameters
    ----------
    environment : lmdb.Environment
        Whose. Stays the caller's.
    check_open : callable
        Raises when it may not be used any more.
    """

    def __init__(self, environment: lmdb.Environment, check_open: Callable[[], None]) -> None:
        self._lmdb = environment
        self._check_open = check_open
        self._cleared = time.monotonic()

    def clear(self) -> int:
        """Clear the slots of dead processes; return how many there were."""
        self._check_open()
        self._cleared = time.monotonic()
        with translated():
            return int(self._lmdb.reader_check())

    def clear_due(self, seconds: float = 30.0) -> None:
        """Clear dead readers' slots if that was not done for a while."""
        if time.monotonic() - self._cleared > seconds:
            self.clear()

    def oldest(self) -> int | None:
        """The oldest transaction that a reader of any process still sees, or None without readers."""
        with translated():
            text = str(self._lmdb.readers())
        seen = [int(line.split()[-1]) for line in text.splitlines()[1:] if line.split() and line.split()[-1].isdigit()]
        return min(seen, default=None)

    def await_passed(self, seconds: float) -> bool:
        """Wait until no reader is older than what is committed now, having cleared dead ones. False when one is left after that."""
        self.clear()
        with translated():
            last = int(self._lmdb.info()["last_txnid"])
        deadline = time.monotonic() + seconds
        while (oldest := self.oldest()) is not None and oldest < last:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        return True
