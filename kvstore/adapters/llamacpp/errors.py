"""What goes wrong between the adapter and libllama, beside a layout that it refuses (`kvstore.errors.LayoutError`)."""

from __future__ import annotations

from kvstore.errors import KVStoreError

__all__ = ["BlobError", "EngineError"]


class BlobError(KVStoreError, ValueError):
    """A sequence's blob is not what this adapter reads; nothing was taken from it."""


class EngineError(KVStoreError, RuntimeError):
    """libllama refused a call, or a sequence does not hold the positions it was asked for."""
