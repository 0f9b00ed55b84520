"""Memory that is freed and soon wanted again."""

from __future__ import annotations

from functools import cache

from kvstore.kernel._native import lib

__all__ = ["keep_freed"]


@cache
def keep_freed() -> None:
    """Let the C library keep what is freed, up to 64 MiB at the end of each heap, instead of giving it back.

    Once for the process, and for all that it allocates; see ``kvs_keep_freed``.
    """
    lib.kvs_keep_freed()
