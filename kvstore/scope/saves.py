"""Saves of this process that are writing an incomplete checkpoint: which of the notes in the store are still meant."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.env import Process, is_running, this_process
from kvstore.records.meta import SaveRecord

__all__ = ["SaveUnderWay", "SavesUnderWay"]


@dataclass(slots=True, eq=False)
class SaveUnderWay:
    """One save, as its transactions share it. `save_id` is 0 until the first of its states are written."""

    save_id: int = 0


class SavesUnderWay:
    """The saves of one process under way. Thread-safe."""

    def __init__(self) -> None:
        # A number that was handed out by a transaction that was aborted is another save's next time: so each names its owner.
        self._owners: dict[int, SaveUnderWay] = {}
        self._left: set[int] = set()
        self._guard = threading.Lock()

    @property
    def left(self) -> frozenset[int]:
        """Saves that have ended half way, while no transaction has dropped what they left."""
        with self._guard:
            return frozenset(self._left)

    def begin(self, save: SaveUnderWay) -> None:
        """Note that a save is under way, in the transaction that notes it in the store."""
        with self._guard:
            self._owners[save.save_id] = save

    def end(self, save: SaveUnderWay, *, whole: bool) -> bool:
        """Note that a save isn't under way any more; says whether it may have left something behind."""
        with self._guard:
            mine = [save_id for save_id, owner in self._owners.items() if owner is save]
            for save_id in mine:
                del self._owners[save_id]
            if not whole:
                self._left.update(mine)
            return bool(mine) and not whole

    def cleared(self, save_ids: Iterable[int]) -> None:
        """Note that nothing is left of saves that were among `left`."""
        with self._guard:
            self._left.difference_update(save_ids)

    def runs(self, record: SaveRecord) -> bool:
        """Whether the save that a note in the store is about is under way, here or in another process."""
        process = Process(record.pid, record.started, record.boot)
        if process != this_process():
            return is_running(process)
        with self._guard:
            return record.save_id in self._owners
