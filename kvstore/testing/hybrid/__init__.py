"""A synthetic hybrid model with every kind of state there is."""

from kvstore.testing.hybrid.engine import VOCABULARY, SyntheticHybrid
from kvstore.testing.hybrid.layout import KVFormat, hybrid_layout

__all__ = ["VOCABULARY", "KVFormat", "SyntheticHybrid", "hybrid_layout"]
