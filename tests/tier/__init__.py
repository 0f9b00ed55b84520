"""The tier: promote and cascade over an engine whose every byte depends on all that it has read."""
