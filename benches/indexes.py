"""Other ways to find the longest known prefix of a prompt, all in memory: what a server has without a store.

Needs numpy and blake3 alone. Another environment's index (a server's radix tree, say) is measured beside these by giving it the two
methods of `PrefixIndex` and asking it for `benches.prefixes.prompts`.
"""

from __future__ import annotations

from typing import Protocol

from blake3 import blake3

from benches.prefixes import Prompt

__all__ = ["BlockHashes", "PrefixIndex"]


class PrefixIndex(Protocol):
    """Knows sessions, and finds of how many leading tokens of a prompt it knows the state."""

    def add(self, tokens: Prompt) -> None:
        """Note a session."""

    def match(self, tokens: Prompt) -> int:
        """How many leading tokens are known."""


class BlockHashes:
    """A dictionary of hashes, one for each whole block of a prompt and all that precedes it. It compares no tokens.

    Parameters
    ----------
    block : int
        Tokens of a block. Servers have 16 or so.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._known: dict[bytes, int] = {}

    def add(self, tokens: Prompt) -> None:
        """See `PrefixIndex.add`."""
        before = b""
        for stop in range(self._block, tokens.size + 1, self._block):
            before = blake3(before + tokens[stop - self._block : stop].tobytes()).digest()
            self._known[before] = len(self._known)

    def match(self, tokens: Prompt) -> int:
        """See `PrefixIndex.match`."""
        raw, step, before = tokens.tobytes(), 4 * self._block, b""
        for at in range(0, len(raw) - step + 1, step):
            before = blake3(before + raw[at : at + step]).digest()
            if before not in self._known:
                return at // 4
        return len(raw) // step * self._block
