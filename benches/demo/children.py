"""Server processes as the demo sees them."""

from __future__ import annotations

import sys
from pathlib import Path

from benches.children import Child

__all__ = ["DemoError", "ServerProcess"]


class DemoError(RuntimeError):
    """The demo could not be carried out."""


class ServerProcess(Child):
    """One server process.

    Parameters
    ----------
    context : int
        Cells of its engine's KV cache.
    store : path, optional
        The store that it opens.
    max_bytes : int, optional
        The store's cap, for the process that creates it.
    """

    failure = DemoError
    greets = True
    farewell = 120.0  # it may have a session to write

    def __init__(self, context: int, *, store: Path | None = None, max_bytes: int | None = None) -> None:
        command = [sys.executable, "-m", "benches.demo.server", "--context", str(context)]
        if store is not None:
            command += ["--store", str(store)]
        if max_bytes is not None:
            command += ["--max-bytes", str(max_bytes)]
        super().__init__(command, "a server process")

    @property
    def layout(self) -> str:
        """Its engine's layout, canonically encoded."""
        return str(self.hello["layout"])
