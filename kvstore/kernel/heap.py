"""Memory that is freed and soon wanted again."""

from __future__ import annotations

from functools import cache

from kvstore.kernel._native import lib

__all__ = ["keep_freed"]


@cache
def keep_freed() -> None:
    """Let the C library keep what is freed, up to 64 MiB of it, instead of giving it back at once; see ``kvs_keep_freed``.

    Works once for the process.
    """
    lib.kvs_keep_freed()
