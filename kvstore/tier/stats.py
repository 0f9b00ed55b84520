"""Counters of a tier: what a server shows its operators."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

__all__ = ["TierCounters", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier has done.

    Attributes
    ----------
    promotes, promoted, promote_misses : int
        Calls; those that restored something; those that started clean.
    reused_tokens, fresh_tokens : int
        Tokens of prompts that were restored, and those left to compute.
    fallbacks : int
        Times that a promote met damaged bytes and went on with a shorter prefix or a clean start.
    faults : int
        Calls that became misses because something in the environment failed; the log says what.
    cascades, saved, save_misses : int
        Calls; those whose session is stored whole by now; those that aren't.
    new_tokens, new_bytes : int
        Tokens that cascades added, and bytes of block values written for them.
    dropped_answers : int
        Answers that were removed, because their clients had gone on without them.
    shared_blocks_checked, differing_blocks : int
        With `check=True`: stored blocks compared with the engine's rows, and those that differed.
    restore_seconds, capture_seconds, save_seconds : float
        Time in promotes that restored something; time in cascades (copying, in the server's way); time spent writing behind.
    """

    promotes: int = 0
    promoted: int = 0
    promote_misses: int = 0
    reused_tokens: int = 0
    fresh_tokens: int = 0
    fallbacks: int = 0
    faults: int = 0
    cascades: int = 0
    saved: int = 0
    save_misses: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    dropped_answers: int = 0
    shared_blocks_checked: int = 0
    differing_blocks: int = 0
    restore_seconds: float = 0.0
    capture_seconds: float = 0.0
    save_seconds: float = 0.0


class TierCounters:
    """The counters behind `TierStats`. Thread-safe."""

    def __init__(self) -> None:
        self._stats = TierStats()
        self._guard = threading.Lock()

    @property
    def stats(self) -> TierStats:
        """A consistent copy."""
        return self._stats

    def add(self, **changes: float) -> None:
        """Add to counters by name."""
        with self._guard:
            values = {name: getattr(self._stats, name) + change for name, change in changes.items()}
            self._stats = replace(self._stats, **values)

    def wrote(self, written: int) -> None:
        """Count bytes written."""
        self.add(new_bytes=written)

    def spent(self, seconds: float) -> None:
        """Count time spent writing."""
        self.add(save_seconds=seconds)

    def settle(self, failed: str, new_tokens: int) -> None:
        """Count a cascade that is through."""
        self.add(new_tokens=new_tokens, saved=int(not failed), save_misses=int(bool(failed)), faults=int(bool(failed)))
