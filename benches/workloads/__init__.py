"""The workloads, one a module; each measures kvstore beside what it is compared with, in one run."""

from __future__ import annotations

from benches.harness import Bench
from benches.workloads import (
    churn,
    cold,
    hybrid,
    kernel,
    layers,
    lease,
    limits,
    mapped,
    match,
    memory,
    needle,
    peers,
    processes,
    restore,
    save,
    sharing,
    sizes,
    trace,
    turn,
    turns,
)

__all__ = ["BENCHES"]

BENCHES: dict[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (
        limits,
        match,
        lease,
        turn,
        turns,
        restore,
        kernel,
        cold,
        layers,
        hybrid,
        mapped,
        save,
        sizes,
        memory,
        processes,
        churn,
        sharing,
        needle,
        trace,
        peers,
    )
}
"""By name, in the order in which `all` runs them."""
