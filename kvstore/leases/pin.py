"""What keeps leased bytes in place: an open read transaction, held by the lease and by every array made from it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.env import Reader
from kvstore.errors import LeaseClosedError
from kvstore.leases.held import held_bytes
from kvstore.scope import StoreScope

__all__ = ["LEASE_AGE_LIMIT", "Pin"]

_log = logging.getLogger("kvstore")

LEASE_AGE_LIMIT = 30.0  # seconds after which a lease is reported: it pins every page that was freed since it began


class Pin:
    """A read transaction with holders. It ends with the last one; the file stays open until then. Thread-safe."""

    def __init__(self, store: StoreScope) -> None:
        self._store = store
        self._holders = 1
        # re-entrant, because the last view may die in a garbage collection that starts inside these methods
        self._guard = threading.RLock()
        self._began = time.monotonic()
        self._reported = False
        self._whole: Callable[[], npt.NDArray[np.uint8] | None] = _nothing
        store.environment.retain()
        try:
            self.reader: Reader = store.environment.read()
        except BaseException:
            store.environment.release()
            raise
        store.watch(self)

    @property
    def held(self) -> bool:
        """Whether anything holds the pin beside the lease itself: arrays made from it, or a copy under way."""
        return self._holders > 1

    def hold(self) -> None:
        """Count a holder. Raises LeaseClosedError, and ForkedStoreError in a forked child, whose transaction is the parent's."""
        self._store.environment.check_forked()
        with self._guard:
            if not self._holders:
                raise LeaseClosedError("the lease has ended on another thread; use a lease on one thread at a time")
            self._holders += 1

    def drop(self) -> None:
        """Give a hold back; the last one ends the transaction. Does nothing in a forked child."""
        if self._store.environment.forked:
            return  # and a thread that isn't there may hold the guard
        with self._guard:
            self._holders -= 1
            if self._holders:
                return
        self.reader.close()
        self._store.unwatch(self)
        self.report_if_overdue()
        self._store.environment.release()

    def report_if_overdue(self) -> None:
        """Log and count a lease that lives too long, once: at a write, or when it ends."""
        age = time.monotonic() - self._began
        if age > LEASE_AGE_LIMIT and not self._reported:
            self._reported = True
            self._store.counters.overdue_leases += 1
            _log.warning("a lease has been held for %.0f s; it keeps from reuse every page freed meanwhile: keep leases short", age)

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """A read-only array on the file map. It holds the pin as long as it, or anything made from it, lives.

        All views are slices of one array, which numpy keeps alive for them: a holder of its own for each would cost five times
        as much as the view. The caller vouches that the range lies in the map.
        """
        return self.whole()[offset : offset + length]

    def whole(self) -> npt.NDArray[np.uint8]:
        """The whole map as such an array. Reading it outside of leased blocks is reading what others write."""
        whole = self._whole()
        return self._map() if whole is None else whole

    def _map(self) -> npt.NDArray[np.uint8]:
        """The array that views are slices of, anew: the last one died with its last view, and gave its hold back."""
        file_map = self._store.environment.file_map
        whole = held_bytes(self, file_map.address, file_map.length, read_only=True)
        self._whole = weakref.ref(whole)  # two threads may each make one: both hold the pin, the later one is used
        return whole


def _nothing() -> None:
    """What a weak reference to nothing answers."""
