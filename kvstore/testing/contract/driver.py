"""What the contract suite needs of an engine beside the `Engine` protocol: to make one, to have it read, to look into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from kvstore.arrays import Array
from kvstore.ids import TokenArray
from kvstore.tier import Engine

__all__ = ["E", "EngineDriver"]

E = TypeVar("E", bound=Engine)


class EngineDriver(Protocol[E]):
    """Drives an engine for the contract suite. Written by the adapter's author, for one model in one configuration.

    Engines have to be deterministic: two that read the same tokens in the same batches hold the same bytes. The suite hands
    both engines of each comparison the same batches, since many engines' bytes depend on them.
    """

    def make(self) -> E:
        """Make an engine that stands at position 0 of an empty sequence; the same layout each time.

        Called some ninety times, a hundred without states; two are in use at once. Each needs room for
        the positions that the suite reads: see `positions_needed`.
        """

    def close(self, engine: E) -> None:
        """Release an engine that `make` made."""

    def tokens(self, count: int, seed: int) -> TokenArray:
        """Make up `count` valid token ids, the same on each call, and others for each seed."""

    def feed(self, engine: E, tokens: TokenArray) -> None:
        """Let the engine compute tokens on from where it stands. One call is one batch, as far as the engine has batches."""

    def parts(self, engine: E, length: int) -> Mapping[str, Array]:
        """Hand out every stream's rows [0, length) or more, and every state at the engine's position, by name.

        As `kvstore.state_hash` takes them: copies, or views that are valid until the next call. `length` is at most the
        engine's position.
        """

    def observe(self, engine: E) -> bytes:
        """Say what the engine would do next: its logits, or anything that follows from all that it holds.

        Asked for right after `feed`, never right after `apply`, when most engines have computed nothing yet. What only a part
        of the engine says (the proposals of a drafter) belongs to it.
        """
