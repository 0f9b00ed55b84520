"""Leases: what of a prompt is stored, pinned in place, viewed or copied out."""

from kvstore.leases.lease import Lease, LeasedBlock, open_lease
from kvstore.leases.mapped import Mapped
from kvstore.leases.match import Match, find_prefix
from kvstore.leases.pin import LEASE_AGE_LIMIT

__all__ = ["LEASE_AGE_LIMIT", "Lease", "LeasedBlock", "Mapped", "Match", "find_prefix", "open_lease"]
