"""A peer's process as the runner sees it: it has a time limit, and is ended with all that it started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benches.children import Child

__all__ = ["ROOT", "PeerFailed", "PeerProcess"]

ROOT = Path(__file__).parents[2]


class PeerFailed(RuntimeError):
    """A peer's process crashed, reported an error, or did not answer in time."""


class PeerProcess(Child):
    """One process of a peer, in a process group of its own: servers that it starts end with it.

    Parameters
    ----------
    command : sequence of str
        What to run.
    name : str
        For messages.
    patience : float
        Seconds that it may take for an answer.
    environment : mapping of str to str, optional
        Added to the environment.
    """

    failure = PeerFailed
    greets = True
    group = True
    strict = False  # some crash when they end, which is nobody's loss
    traces = False
    farewell = 20.0
    words = 6

    def __init__(self, command: Sequence[str], name: str, patience: float, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(command, name, patience, environment, ROOT)
