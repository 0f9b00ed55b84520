"""Leases: what of a prompt is stored, pinned in place, viewed or copied out."""

from kvstore.leases.blocks import LeasedBlock
from kvstore.leases.chunks import Chunk, Chunks
from kvstore.leases.described import HostBuffer
from kvstore.leases.destinations import DeviceArray
from kvstore.leases.device import DeviceTransfer
from kvstore.leases.lease import Lease, open_lease
from kvstore.leases.mapped import Mapped
from kvstore.leases.match import Match, find_prefix
from kvstore.leases.pin import LEASE_AGE_LIMIT
from kvstore.leases.transfer import Transfer

__all__ = [
    "LEASE_AGE_LIMIT",
    "Chunk",
    "Chunks",
    "DeviceArray",
    "DeviceTransfer",
    "HostBuffer",
    "Lease",
    "LeasedBlock",
    "Mapped",
    "Match",
    "Transfer",
    "find_prefix",
    "open_lease",
]
