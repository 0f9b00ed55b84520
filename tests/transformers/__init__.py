"""Tests of the adapter for Transformers: real models, tiny and with random weights."""
