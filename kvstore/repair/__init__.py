"""Repair of a damaged store: what can't be trusted is moved aside, what verifies is kept."""

from kvstore.repair.repair import repair
from kvstore.repair.result import RepairResult

__all__ = ["RepairResult", "repair"]
