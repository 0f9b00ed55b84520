"""Kinds of `SyntheticHybrid` that are broken in one way each."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from kvstore import Restored
from kvstore.testing import SyntheticHybrid


def forgetful_hybrid(*names: str) -> type[SyntheticHybrid]:
    """Make a kind of hybrid that takes parts and puts them nowhere."""

    class Forgetful(SyntheticHybrid):
        def apply(self, restored: Restored) -> None:
            """See the class."""
            mine = {name: self.streams[name].copy() for name in names if name in self.streams}
            states = {name: state.copy() for name, state in self.states.items() if name in names}
            super().apply(restored)
            for name, rows in mine.items():
                self.streams[name][...] = rows
            self._rows_seen = blake3(self._rows[: self.position].tobytes())
            for name, state in states.items():
                there = self.states[name]
                there[...] = state if there.shape == state.shape else 0

    return Forgetful


class UnreadDrafter(SyntheticHybrid):
    """Its drafter starts anew after each restore, and nobody asks what it would have proposed."""

    def _hash(self, head: bytes) -> blake3:
        ring, self._ring = self._ring, np.zeros_like(self._ring)
        try:
            return super()._hash(head)
        finally:
            self._ring = ring


class Unshifted(SyntheticHybrid):
    """Takes the drafter's rows without their shift: each is one position off."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        rows = self._rows[: self.position, self._drafter]
        rows[:-1] = rows[1:].copy()
        self._rows_seen = blake3(self._rows[: self.position].tobytes())


class DeadKeyElsewhere(SyntheticHybrid):
    """Restores the dead key into row 0 of the pooled keys, wherever the spare row is."""

    def apply(self, restored: Restored) -> None:
        """See the class."""
        super().apply(restored)
        self._pooled[0] = self.states["index.dead"]
