"""The environment: opening, locking, forking, and what can be wrong with a file."""
