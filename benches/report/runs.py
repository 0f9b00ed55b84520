"""The results that there are: read from their files, kept apart by machine and version, the ones to be shown chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches import results
from benches.harness import SIZES, Outcome, Size
from benches.machine import upstream

__all__ = ["Machine", "Run", "Shown", "choose", "read"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What tells one machine, with what is installed on it, from another.

    Attributes
    ----------
    processor, file_system, device, kernel, python : str
    cores : int
    memory_gib : float
        To a tenth: a reboot changes it by less.
    packages : tuple of (str, str)
        Names and versions.
    """

    processor: str
    cores: int
    memory_gib: float
    file_system: str
    device: str
    kernel: str
    python: str
    packages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A result.

    Attributes
    ----------
    path : Path
        Its file.
    name : str
        Of the benchmark.
    size : str
    finished : str
        Local time with its offset, as ISO 8601 has it.
    seconds : float
        How long it took.
    machine : Machine
    source : str
        What kvstore's files hashed to; empty where that is not known.
    commit : str
        The commit that they were of; empty where that is not known.
    outcome : Outcome
    failure : str or None
        Why it broke off; None for a complete one.
    measured : dict
        Of one that broke off: seconds of its comparisons, as far as they came.
    """

    path: Path
    name: str
    size: Size
    finished: str
    seconds: float
    machine: Machine
    source: str
    commit: str
    outcome: Outcome
    failure: str | None
    measured: dict[str, dict[str, list[float]]]

    @property
    def when(self) -> str:
        """The minute in which it was finished."""
        return self.finished[:16].replace("T", " ")

    @property
    def version(self) -> str:
        """The code that was measured: kvstore's number, and what tells it from other code of the same number."""
        number = dict(self.machine.packages).get("kvstore", "of an unknown version")
        known = [f"commit {self.commit}"] * bool(self.commit) + [self.source] * bool(self.source)
        return number + (f" ({', '.join(known)})" if known else "")


def _machine(record: dict[str, Any]) -> Machine:
    return Machine(
        processor=str(record["processor"]),
        cores=int(record["cores"]),
        memory_gib=round(record["memory_bytes"] / 2**30, 1),
        file_system=str(record["file_system"]),
        device=str(record["device"]),
        kernel=upstream(str(record["kernel"])),
        python=str(record["python"]),
        packages=tuple((str(k), str(v)) for k, v in record["packages"].items()),
    )


def _run(path: Path, record: dict[str, Any]) -> Run:
    if record["size"] not in SIZES:
        raise ValueError(f"there is no size {record['size']!r}")
    return Run(
        path=path,
        name=str(record["bench"]),
        size=record["size"],
        finished=str(record["finished"]),
        seconds=float(record["seconds"]),
        machine=_machine(record["machine"]),
        source=str(record["machine"].get("source", "")),
        commit=str(record["machine"].get("commit", "")),
        outcome=results.decode(record),
        failure=None if record.get("complete", True) else str(record["failure"]),
        measured={
            str(what): {str(side): [float(s) for s in taken] for side, taken in sides.items()}
            for what, sides in record.get("measured", {}).items()
        },
    )


def read(directory: Path) -> tuple[list[Run], list[str]]:
    """Read all results in a directory, oldest first; and name the files that are passed over, with the reason."""
    runs: list[Run] = []
    passed: list[str] = []
    for path in sorted(directory.glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            if not isinstance(record, dict) or "version" not in record:
                raise ValueError("it has no version")
            if record["version"] != results.VERSION:
                kind = "an older" if isinstance(record["version"], int) and record["version"] < results.VERSION else "another"
                passed.append(
                    f"{path}: passed over, written by {kind} version of the benchmarks ({record['version']}, not "
                    f"{results.VERSION}): run it again"
                )
                continue
            runs.append(_run(path, record))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            passed.append(f"{path}: passed over, not a result of a benchmark: {type(error).__name__}: {error}")
    return sorted(runs, key=lambda run: (run.finished, run.path.name)), passed


@dataclass(frozen=True, slots=True)
class Shown:
    """What the page has of one benchmark on one machine.

    Attributes
    ----------
    run : Run
        The newest complete one of the size shown; the newest that broke off where there is no other.
    others : tuple of Run
        Earlier complete ones of the same size, machine and code, oldest first: how far the ratios go apart.
    older : int
        How many complete ones of this size and machine there are beside these, of other code.
    broken : Run or None
        A later one that broke off.
    """

    run: Run
    others: tuple[Run, ...] = ()
    older: int = 0
    broken: Run | None = None

    @property
    def same(self) -> tuple[Run, ...]:
        """All runs of the same size, machine and code, oldest first."""
        return (*self.others, self.run)


def choose(runs: Sequence[Run]) -> list[Shown]:
    """Choose what to show of the runs of one benchmark: of the largest size that there is, by machine, the newest first."""
    if not runs:
        return []
    complete = [run for run in runs if run.failure is None]
    size = min((run.size for run in complete or runs), key=SIZES.index)
    shown = []
    machines = dict.fromkeys(run.machine for run in reversed(runs) if run.size == size)
    for machine in machines:
        here = [run for run in runs if run.size == size and run.machine == machine]
        whole = [run for run in here if run.failure is None]
        newest = here[-1]
        if not whole:
            shown.append(Shown(newest))
            continue
        last = whole[-1]
        same = tuple(run for run in whole[:-1] if run.source == last.source)
        shown.append(Shown(last, same, len(whole) - 1 - len(same), newest if newest.failure is not None else None))
    return shown
