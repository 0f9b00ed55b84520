"""Changing a store's cap."""

from __future__ import annotations

import os

from kvstore.check import Progress
from kvstore.env import Environment, check_beside, check_room, compact, exclusive_environment, map_bytes_for, raise_cap
from kvstore.eviction import Limits
from kvstore.scope import StoreScope

__all__ = ["resize"]


def resize(
    path: str | os.PathLike[str],
    max_bytes: int,
    *,
    lock_timeout: float = 10.0,
    any_owner: bool = False,
    any_filesystem: bool = False,
    progress: Progress | None = None,
) -> None:
    """Change the cap of a store that nobody has open, this process included. See `Store.resize`, which raises the same."""
    with exclusive_environment(path, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem) as environment:
        map_bytes = map_bytes_for(max_bytes, environment.page_bytes)
        if max_bytes > environment.record.cap:
            check_room(environment.path, max_bytes, environment.file_bytes())
            raise_cap(environment, max_bytes)
        elif max_bytes < environment.record.cap:
            _lower(environment, max_bytes, map_bytes, lock_timeout, progress)


def _lower(environment: Environment, max_bytes: int, map_bytes: int, lock_timeout: float, progress: Progress | None) -> None:
    scope = StoreScope(environment, lock_timeout)
    with environment.reading() as txn:
        now, live = scope.limits(txn), txn.live_pages()
    limit = Limits(map_bytes // environment.page_bytes, now.block_pages, now.mixed).live_pages
    check_beside(environment, min(live, limit) * environment.page_bytes)
    if progress is not None:
        progress("evicting", 0, max(live - limit, 0))
    scope.evict_down(limit)
    compact(environment, max_bytes, progress)
