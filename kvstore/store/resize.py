"""Changing a store's cap."""

from __future__ import annotations

import os

from kvstore.env import acquire_environment, compact, is_open, map_bytes_for, raise_cap
from kvstore.errors import StoreBusyError
from kvstore.eviction import Limits
from kvstore.scope import StoreScope
from kvstore.store.stats import StoreStats, gather_stats

__all__ = ["resize"]


def resize(path: str | os.PathLike[str], max_bytes: int, *, lock_timeout: float) -> StoreStats:
    """See `Store.resize`."""
    if is_open(path):
        raise StoreBusyError(f"{os.fspath(path)} is open in this process; close its handles and leases before you resize it")
    environment = acquire_environment(path, max_bytes=None, lock_timeout=lock_timeout, any_owner=False)
    try:
        map_bytes = map_bytes_for(max_bytes, environment.page_bytes)
        if not environment.exclusive(lock_timeout):
            raise StoreBusyError(f"{environment.path} is open in another process; close it everywhere before you resize it")
        if max_bytes > environment.record.cap:
            raise_cap(environment, max_bytes)
        elif max_bytes < environment.record.cap:
            scope = StoreScope(environment, lock_timeout)
            with environment.reading() as txn:
                now = scope.limits(txn)
            scope.evict_down(Limits(map_bytes // environment.page_bytes, now.block_pages, now.mixed).live_pages)
            compact(environment, max_bytes)
    finally:
        environment.release()
    environment = acquire_environment(path, max_bytes=None, lock_timeout=lock_timeout, any_owner=False)
    try:
        return gather_stats(StoreScope(environment, lock_timeout))
    finally:
        environment.release()
