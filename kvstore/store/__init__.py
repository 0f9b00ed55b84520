"""The public face of the library: orchestration only."""

from kvstore.store.namespace import EvictResult, Namespace
from kvstore.store.stats import NamespaceInfo, StoreStats
from kvstore.store.store import Store, VerifyResult

__all__ = ["EvictResult", "Namespace", "NamespaceInfo", "Store", "StoreStats", "VerifyResult"]
