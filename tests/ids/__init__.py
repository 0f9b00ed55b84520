"""Identities: tokens, and the hashes that name things."""
