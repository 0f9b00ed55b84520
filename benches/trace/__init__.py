"""Request traces: reading one, making one up, and what caches of a given size could at most have reused of it."""

from benches.trace.caches import Reuse, least_recently_used, optimum, unbounded
from benches.trace.requests import SPAN, Request, TraceError, distinct_blocks, read_trace
from benches.trace.synthetic import synthetic_trace

__all__ = [
    "SPAN",
    "Request",
    "Reuse",
    "TraceError",
    "distinct_blocks",
    "least_recently_used",
    "optimum",
    "read_trace",
    "synthetic_trace",
    "unbounded",
]
