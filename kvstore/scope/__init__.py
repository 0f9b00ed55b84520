"""What the handles of one store share in a process, and what the calls on one namespace share."""

from kvstore.scope.namespace import NamespaceScope
from kvstore.scope.saves import SaveUnderWay
from kvstore.scope.store import StoreCounters, StoreScope

__all__ = ["NamespaceScope", "SaveUnderWay", "StoreCounters", "StoreScope"]
