"""What a run leaves behind: a JSON file for each workload, and lines for people."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches.harness import Outcome, Plot, Size, Table, Target
from benches.machine import Machine

__all__ = ["RESULTS", "VERSION", "compose", "decode", "describe", "encode", "latest_seconds", "write"]

RESULTS = Path(".bench")
VERSION = 2


def encode(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON takes it."""
    return {
        "doubts": outcome.doubts,
        "targets": [{**asdict(t), "met": t.met} for t in outcome.targets],
        "figures": outcome.figures,
        "tables": [asdict(table) for table in outcome.tables],
        "plots": [asdict(plot) for plot in outcome.plots],
        "lines": outcome.lines,
    }


def decode(record: Mapping[str, Any]) -> Outcome:
    """An outcome out of what `encode` made, or out of a result's file.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is not one.
    """
    targets = [Target(str(t["name"]), float(t["value"]), float(t["limit"]), at_most=bool(t["at_most"])) for t in record["targets"]]
    tables = [
        Table(
            str(t["title"]),
            tuple(map(str, t["columns"])),
            tuple(tuple(row) for row in t["rows"]),
            str(t.get("note", "")),
        )
        for t in record["tables"]
    ]
    for table in tables:
        if any(len(row) != len(table.columns) for row in table.rows):
            raise ValueError(f"a row of the table {table.title!r} has not {len(table.columns)} cells")
    plots = [
        Plot(
            **{
                **plot,
                "lines": {name: [(float(x), float(y)) for x, y in points] for name, points in plot["lines"].items()},
                "groups": tuple(plot.get("groups", ())),
            }
        )
        for plot in record["plots"]
    ]
    return Outcome(
        figures=dict(record["figures"]),
        targets=targets,
        tables=tables,
        plots=plots,
        lines=list(map(str, record.get("lines", []))),
        doubts=list(map(str, record["doubts"])),
    )


def compose(
    name: str,
    size: Size,
    machine: Machine,
    seconds: float,
    outcome: Mapping[str, Any],
    *,
    failure: str | None = None,
    measured: Mapping[str, Any] | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """The record of a run, as it is written.

    Of a run that broke off `failure` says why, `measured` has the seconds that its comparisons had come to, and `trace` where
    in the code it was.
    """
    record = {
        "version": VERSION,
        "bench": name,
        "size": size,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(seconds, 3),
        "complete": failure is None,
        "machine": machine.record(),
        **outcome,
    }
    if failure is not None:
        record |= {"failure": failure, "measured": dict(measured or {}), "traceback": trace}
    return record


def write(directory: Path, record: Mapping[str, Any]) -> Path:
    """Write a record; earlier ones of the same workload and size stay beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{record['bench']}-{record['size']}-{time.strftime('%Y%m%dT%H%M%S')}" + ("" if record["complete"] else "-partial")
    path, again = directory / f"{stem}.json", 1
    while path.exists():
        again += 1
        path = directory / f"{stem}-{again}.json"
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def latest_seconds(directory: Path, name: str, size: Size) -> float | None:
    """How long the last complete run of a workload took, by its file."""
    for path in sorted(directory.glob(f"{name}-{size}-*.json"), reverse=True):
        try:
            record = json.loads(path.read_text())
            if record.get("complete", True):
                return float(record["seconds"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the report names it
    return None


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
