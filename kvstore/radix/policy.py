"""Which checkpoints a session has: where they are worth taking, and how many of them are kept."""

from __future__ import annotations

import operator
from dataclasses import dataclass

__all__ = ["CheckpointPolicy"]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where states are saved, and which are kept. Code, not format: it may change at any time, and names nothing on disk.

    A path (a session from its beginning to its end) keeps

    - its `per_path` deepest checkpoints: with 2 the turn's boundary, which a client that hides reasoning comes back to, and the end
      of the answer;
    - the one saved last;
    - at each node where sessions part, the deepest at or before it, and as many more as another branch needs to have `per_path`;
    - with `every`, the deepest in each span of so many positions.

    The save that completes a checkpoint drops what it supersedes; so does the eviction that leaves a node one child, in a process
    that has a handle on the namespace. So a conversation of n tokens costs the states of per_path + n / every checkpoints, and of
    one (`per_path` at most) for each place at which others have left it.

    All processes should give a namespace the same policy: each applies its own to the path that it saves.

    Attributes
    ----------
    per_path : int
        At least 1.
    every : int
        Take a checkpoint at each multiple of so many positions, and keep one in each such span: what an edit of an earlier turn
        comes back to. 0 for none.
    at_branches : bool
        Take a checkpoint where a prompt leaves what another session has stored: states of a common beginning are worth keeping
        once a second session has come along.
    least_gain : int
        But not there when the last checkpoint is less than so many tokens back: a chat that hides reasoning leaves its own past
        a few tokens behind each turn's boundary.
    drop_answers : bool
        Drop an answer, rows and states, once its client has come back to the turn's boundary and gone on without it, as one does
        that hides reasoning: it won't be asked for again. Seen by the tier that saved it, for its last 16 answers.
    boundary : int
        How many tokens before the end of a prompt the turn's checkpoint lies. With 1 the same prompt can be resumed when it is
        sent again, since something is left to compute. At a template whose last tokens (an opening tag, say) are left out of the
        history later, give their number.

    Raises
    ------
    ValueError
        When a number is none or out of its range.
    """

    per_path: int = 2
    every: int = 0
    at_branches: bool = True
    least_gain: int = 128
    drop_answers: bool = True
    boundary: int = 1

    def __post_init__(self) -> None:
        for name, least in (("per_path", 1), ("every", 0), ("least_gain", 1), ("boundary", 0)):
            value = getattr(self, name)
            try:
                number = operator.index(value)
            except TypeError:
                number = least - 1
            if number < least or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
            object.__setattr__(self, name, number)

    def kept(self, positions: list[int]) -> set[int]:
        """Which of a path's positions, ascending, are kept for the path's own sake."""
        keep = set(positions[-self.per_path :])
        if self.every:
            keep.update({position // self.every: position for position in positions}.values())
        return keep
