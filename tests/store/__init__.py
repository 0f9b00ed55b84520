"""The store: saves, matches, leases, eviction, damage, several processes."""
