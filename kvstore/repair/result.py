"""What a repair found and did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RepairResult"]


@dataclass(frozen=True, slots=True)
class RepairResult:
    """What a repair found and did, in numbers.

    What was lost is counted as far as it could still be named: of a page that is gone nobody knows what it held.

    Attributes
    ----------
    path : str
        The store's directory.
    problems : tuple of str
        What was wrong; empty for a sound store, of which nothing was changed.
    changed : bool
        Whether the store was changed. Never in a dry run.
    rewritten : bool
        Whether the store has a new data file, or would get one: its structure was damaged. Else it is repaired in place.
    moved_to : str
        The directory to which the damaged data file was moved; empty if it wasn't.
    sessions_kept, sessions_lost : int
        Sessions that are no prefix of another one. One that was shortened counts as lost.
    nodes_kept, nodes_lost : int
        Nodes of the index that are whole, and those that are not.
    tokens_kept, tokens_lost : int
        Distinct token positions.
    blocks_kept, blocks_lost : int
        Distinct blocks; lost are those of which there is no whole copy.
    kept_bytes : int
        Payload of the blocks that were kept.
    max_bytes : int
        The cap.
    seconds : float
        Wall time.
    """

    path: str
    problems: tuple[str, ...]
    changed: bool
    rewritten: bool
    moved_to: str
    sessions_kept: int
    sessions_lost: int
    nodes_kept: int
    nodes_lost: int
    tokens_kept: int
    tokens_lost: int
    blocks_kept: int
    blocks_lost: int
    kept_bytes: int
    max_bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong with the store."""
        return not self.problems
