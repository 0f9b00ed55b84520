"""The workloads, one a module; each measures kvstore beside what it is compared with, in one run."""

from __future__ import annotations

from benches.harness import Bench
from benches.workloads import churn, cold, kernel, layers, lease, mapped, match, memory, peers, restore, save, sharing, turn

__all__ = ["BENCHES"]

BENCHES: dict[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (
        match,
        lease,
        turn,
        restore,
        kernel,
        cold,
        layers,
        mapped,
        save,
        memory,
        churn,
        sharing,
        peers,
    )
}
"""By name, in the order in which `all` runs them."""
