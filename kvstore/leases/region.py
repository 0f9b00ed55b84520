"""The memory of a mapped buffer: unmapped with its last holder, and what pins the store's pages until then or until a detach."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from kvstore.errors import LeaseClosedError
from kvstore.kernel import Window
from kvstore.leases.held import held_bytes
from kvstore.leases.pin import Pin

__all__ = ["Region"]


class Region:
    """A window with holders: the `Mapped` and each array made from it. The last one unmaps it. Thread-safe.

    It holds a pin until it is detached or unmapped. It has no reference to the `Mapped`, so that no cycle delays either.
    """

    def __init__(self, window: Window, pin: Pin) -> None:
        pin.hold()
        self._pin: Pin | None = pin
        self._holders = 1
        self._guard = threading.RLock()  # re-entrant, as the pin's
        self.window = window
        self._pid = os.getpid()

    @property
    def arrays(self) -> int:
        """How many arrays hold it, beside the `Mapped`."""
        return self._holders - 1

    @property
    def detached(self) -> bool:
        """Whether nothing of the file is in it."""
        return self._pin is None

    def hold(self) -> None:
        """Count a holder."""
        with self._guard:
            if not self._holders:
                raise LeaseClosedError("the mapped buffer was closed on another thread; close it when all are done with it")
            self._holders += 1

    def drop(self) -> None:
        """Give a hold back; the last one unmaps the window and then lets the pin go."""
        if not self._guard.acquire(timeout=-1 if self._pid == os.getpid() else 0):
            return  # a forked child: another thread of the parent was just at it; the window stays until the child ends
        try:
            self._holders -= 1
            if self._holders:
                return
        finally:
            self._guard.release()
        self.window.close()
        self._unpin()

    def detach(self, threads: int | None) -> None:
        """Replace the window by a copy and let the pin go. Raises OSError, with all as it was."""
        self.hold()  # nobody unmaps it meanwhile
        try:
            if not self.detached:
                self.window.detach(threads=threads)
                self._unpin()
        finally:
            self.drop()

    def _unpin(self) -> None:
        with self._guard:
            pin, self._pin = self._pin, None
        if pin is not None:
            pin.drop()

    def bytes(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """Some of the window's bytes as an array, which holds the region as long as it, or anything made from it, lives."""
        return held_bytes(self, self.window.address + start, length, read_only=False)
