"""An engine that only holds arrays: what a tier takes from it and gives it costs nothing beside the copy itself."""

from __future__ import annotations

from benches.sessions import Array, touched
from kvstore import Layout
from kvstore.tier import Captured, Restored

__all__ = ["ArrayEngine"]


class ArrayEngine:
    """One sequence of arrays; implements `kvstore.tier.Engine`. For layouts of streams with a row a token, the first axis.

    Parameters
    ----------
    layout : Layout
    arrays : dict of str to ndarray
        Of every stream. Whoever uses the engine writes rows into them, or leaves them as they are.

    Attributes
    ----------
    position : int
        How many tokens were restored last.
    """

    def __init__(self, layout: Layout, arrays: dict[str, Array]) -> None:
        self._layout = layout
        self.arrays = arrays
        self.position = 0

    @classmethod
    def empty(cls, layout: Layout, capacity: int) -> ArrayEngine:
        """An engine with room for so many tokens, every page of it in memory."""
        return cls(layout, touched(layout, capacity))

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._layout

    def capture(self, start: int, stop: int) -> Captured:
        """See `Engine.capture`."""
        return Captured({name: array[start:stop] for name, array in self.arrays.items()})

    def apply(self, restored: Restored) -> None:
        """See `Engine.apply`."""
        restored.copy_into(self.arrays)
        self.position = restored.length

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.position = 0
