"""Scenarios of several processes on one store, step by step: who does what in which order, and what is there after each step."""
