"""Tests of the contract suite and of the synthetic hybrid."""
