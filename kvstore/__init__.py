"""kvstore: a memory-mapped, content-addressed block store on local NVMe for the attention state of LLM sessions.

store = Store.open(path, max_bytes=100 << 30)
tier = SessionTier(store, engine, salt=b"")
reused = tier.promote(tokens)      # at most len(tokens) - 1; 0 is a clean start
...                                # the engine computes tokens[reused:]
tier.cascade(tokens)               # at the turn's boundary, then when the answer is done
"""

import logging

from kvstore import errors
from kvstore.arrays import Paged
from kvstore.errors import KVStoreError
from kvstore.ids import as_tokens, image_tokens
from kvstore.layout import DTYPES, Layout, State, StateHash, Stream, state_hash
from kvstore.leases import Chunk, Chunks, DeviceArray, DeviceTransfer, HostBuffer, Lease, LeasedBlock, Mapped, Match, Transfer
from kvstore.radix import CheckpointPolicy
from kvstore.repair import RepairResult
from kvstore.saving import SaveResult
from kvstore.staging import Staging, StagingBuffer
from kvstore.store import EvictResult, Namespace, NamespaceInfo, Store, StoreStats, VerifyResult
from kvstore.tier import Captured, CascadeResult, Engine, Restored, SessionTier, TierStats, WriteBehind

__all__ = [
    "DTYPES",
    "Captured",
    "CascadeResult",
    "CheckpointPolicy",
    "Chunk",
    "Chunks",
    "DeviceArray",
    "DeviceTransfer",
    "Engine",
    "EvictResult",
    "HostBuffer",
    "KVStoreError",
    "Layout",
    "Lease",
    "LeasedBlock",
    "Mapped",
    "Match",
    "Namespace",
    "NamespaceInfo",
    "Paged",
    "RepairResult",
    "Restored",
    "SaveResult",
    "SessionTier",
    "Staging",
    "StagingBuffer",
    "State",
    "StateHash",
    "Store",
    "StoreStats",
    "Stream",
    "TierStats",
    "Transfer",
    "VerifyResult",
    "WriteBehind",
    "as_tokens",
    "errors",
    "image_tokens",
    "state_hash",
]

__version__ = "0.1.0"

logging.getLogger("kvstore").addHandler(logging.NullHandler())
