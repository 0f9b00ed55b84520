"""What `match` looks for, and among what. Needs numpy alone, so that another environment can ask an index of its own the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "LONG", "PREFIXES", "SESSION", "SHARED", "Prompt", "prompts", "random_tokens", "session"]

Prompt = npt.NDArray[np.uint32]

PREFIXES, SHARED, SESSION = 10, 1000, 1536
"""Prefixes that sessions share, tokens of one, tokens of a session. Where sessions part lies inside a block."""
BLOCK = 512
"""Tokens of a block in kvstore."""
LONG = 99
"""Seed of the long session's tokens."""


def random_tokens(seed: int, count: int) -> Prompt:
    """Tokens of a vocabulary of 128k."""
    return np.random.default_rng(seed).integers(0, 128_000, count, dtype=np.uint32)


def session(number: int) -> Prompt:
    """The tokens of a session."""
    prefix = random_tokens(10_000_000 + number % PREFIXES, SHARED)
    return np.concatenate([prefix, random_tokens(number, SESSION - SHARED)])


def prompts(long: Prompt) -> dict[str, tuple[str, Prompt, int]]:
    """What is looked for: what it is, and how many tokens of it are known among the sessions and the long one."""
    middle = long.size // 2 // BLOCK * BLOCK + 100  # inside a block
    divergent, own = long.copy(), session(3)
    divergent[middle] += 1
    own[SHARED + 200] += 1
    other = np.concatenate([session(3)[:SHARED], random_tokens(78, long.size - SHARED)])
    return {
        "long": ("a long session", long, long.size),
        "long_divergent": ("the same, other from inside a block in its middle on", divergent, middle),
        "session": ("a short session", session(3), SESSION),
        "session_divergent": ("the same, other from inside its last block on", own, SHARED + 200),
        "prefix": ("a long prompt that begins as many sessions do", other, SHARED),
        "miss": ("a long prompt that nobody knows", random_tokens(77, long.size), 0),
    }
