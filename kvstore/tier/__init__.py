"""The server's side: an engine protocol, and cascade and promote over it."""

from kvstore.tier.behind import WriteBehind
from kvstore.tier.protocol import Captured, Engine, Restored
from kvstore.tier.session import CascadeResult, SessionTier
from kvstore.tier.stats import TierStats

__all__ = ["Captured", "CascadeResult", "Engine", "Restored", "SessionTier", "TierStats", "WriteBehind"]
