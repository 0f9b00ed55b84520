"""What goes wrong between the adapter and libllama.

Two more come from `kvstore.errors`: LayoutError for a context whose state the adapter does not take, and EngineError for
misuse, which raises even from cascade and promote: these here are faults, which the tier logs and counts.
"""

from __future__ import annotations

from kvstore.errors import KVStoreError

__all__ = ["BlobError", "LlamaCppError"]


class BlobError(KVStoreError, ValueError):
    """A sequence's blob is not what this adapter reads; nothing was taken from it."""


class LlamaCppError(KVStoreError, RuntimeError):
    """libllama refused a call, or is not what the adapter needs."""
