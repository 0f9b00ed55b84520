"""Benchmarks: what kvstore reaches on a machine, each candidate against a baseline measured in the same run."""
