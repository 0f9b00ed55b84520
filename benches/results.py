"""What a run leaves behind: a JSON file for each workload, and lines for people."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from benches.harness import Outcome, Size
from benches.machine import Machine

__all__ = ["RESULTS", "describe", "write"]

RESULTS = Path(".bench")
_VERSION = 2


def write(directory: Path, name: str, size: Size, machine: Machine, seconds: float, outcome: Outcome) -> Path:
    """Write a workload's result; an earlier one of the same workload and size stays beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S")
    record = {
        "version": _VERSION,
        "bench": name,
        "size": size,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(seconds, 3),
        "machine": machine.record(),
        "doubts": outcome.doubts,
        "targets": [{**asdict(t), "met": t.met} for t in outcome.targets],
        "figures": outcome.figures,
        "tables": [asdict(table) for table in outcome.tables],
        "plots": [asdict(plot) for plot in outcome.plots],
    }
    path = directory / f"{name}-{size}-{stamp}.json"
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return path


def describe(outcome: Outcome, size: Size) -> list[str]:
    """What a person reads of a result."""
    lines = [f"  {line}" for line in outcome.lines]
    for target in outcome.targets:
        sign = "at most" if target.at_most else "at least"
        verdict = "met" if target.met else "MISSED"
        if size != "full":
            verdict = f"{verdict}, at a size that says little"
        lines.append(f"  {target.name}: {target.value:.4g}, {sign} {target.limit:.4g}: {verdict}")
    lines += [f"  doubt: {doubt}" for doubt in outcome.doubts]
    return lines
