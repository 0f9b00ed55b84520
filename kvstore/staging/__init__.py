"""Host buffers that are filled and reused: plain ones for saving, page-aligned and pinned ones for devices."""

from kvstore.staging.pool import BufferPool
from kvstore.staging.staging import Staging, StagingBuffer

__all__ = ["BufferPool", "Staging", "StagingBuffer"]
