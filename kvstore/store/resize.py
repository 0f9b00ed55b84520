"""Changing a store's cap."""

from __future__ import annotations

import os

from kvstore.env import acquire_environment, check_beside, compact, exclusive_environment, map_bytes_for, raise_cap
from kvstore.eviction import Limits
from kvstore.scope import StoreScope
from kvstore.store.stats import StoreStats, gather_stats

__all__ = ["resize"]


def resize(path: str | os.PathLike[str], max_bytes: int, *, lock_timeout: float) -> StoreStats:
    """See `Store.resize`."""
    with exclusive_environment(path, lock_timeout=lock_timeout) as environment:
        map_bytes = map_bytes_for(max_bytes, environment.page_bytes)
        if max_bytes > environment.record.cap:
            raise_cap(environment, max_bytes)
        elif max_bytes < environment.record.cap:
            scope = StoreScope(environment, lock_timeout)
            with environment.reading() as txn:
                now, live = scope.limits(txn), txn.live_pages()
            limit = Limits(map_bytes // environment.page_bytes, now.block_pages, now.mixed).live_pages
            check_beside(environment, min(live, limit) * environment.page_bytes)
            scope.evict_down(limit)
            compact(environment, max_bytes)
    environment = acquire_environment(path, max_bytes=None, lock_timeout=lock_timeout, any_owner=False)
    try:
        return gather_stats(StoreScope(environment, lock_timeout))
    finally:
        environment.release()
