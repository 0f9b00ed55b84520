"""What every workload is made of: sizes, a context to run in, alternating pairs, targets."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "SIZES",
    "Bench",
    "Cell",
    "Context",
    "Needs",
    "Outcome",
    "Plot",
    "Seconds",
    "Size",
    "Table",
    "Target",
    "Unavailable",
    "median",
    "pairs",
    "quantile",
]

Size = Literal["full", "quick", "smallest"]
SIZES: tuple[Size, ...] = ("full", "quick", "smallest")
"""The largest first."""
_QUIET = 1.0  # seconds between two lines of progress: hundreds of short rounds are not worth a line each
Seconds = dict[str, list[float]]
"""What each side of a comparison took, round by round."""


class Unavailable(Exception):
    """What a workload needs isn't there on this machine; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a workload needs at most, in bytes: disk in the scratch directory, memory with the page cache it counts on."""

    disk: int
    memory: int


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that has to be reached.

    Attributes
    ----------
    name : str
        What is measured, with its unit.
    value, limit : float
        What came out, and the limit.
    at_most : bool
        Whether the limit is an upper one.
    """

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report.

    Attributes
    ----------
    title : str
        What it shows.
    columns : tuple of str
        Heads, each with its unit. Every table of figures has one with the ratio to the limit or to what it is compared with. By
        the word "ratio" in it, or "times" or "of" at its beginning or behind a comma ("of plain writes", "p99, of one alone"),
        the report knows it, and shows how far it went apart over several runs.
    rows : tuple of tuples
        A cell for each column. Numbers are rounded when they are shown; None is a figure that there is not; true and false
        are shown as yes and no, and no in bold.
    note : str
        What a reader must know to read it right: how a side was set up, why a figure is missing.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the report.

    Attributes
    ----------
    name : str
        Of its file, beside the workload's name.
    title, x, y : str
        Title, and what the axes show, with units.
    lines : dict of str to list of (float, float)
        Points by what they belong to.
    log_x, log_y : bool
        Whether an axis is logarithmic.
    bars : bool
        Bars side by side instead of lines: `lines` then has a point for each group, numbered from 0, and `groups` their names.
    groups : tuple of str
        See `bars`.
    """

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False
    groups: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What a workload measured.

    Attributes
    ----------
    figures : dict
        Everything, as it goes into the JSON file.
    targets : list of Target
        What has a limit.
    lines : list of str
        What a person reads.
    doubts : list of str
        What makes the figures untrustworthy, as far as the workload itself noticed.
    tables : list of Table
    plots : list of Plot
        What the report shows of it.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Context:
    """Where and how large a workload runs.

    Attributes
    ----------
    scratch : Path
        An empty directory of its own, removed afterwards.
    size : str
        One of `SIZES`.
    say : callable
        Takes a line of progress.
    trace : Path or None
        A file of requests to replay, if one was named.
    outcome : Outcome
        To be filled as the workload goes on, and returned: what is in it is kept if the run breaks off.
    note : callable
        Takes the name and the seconds of a comparison so far. They too are kept if the run breaks off; `pairs` calls it.
    """

    scratch: Path
    size: Size
    say: Callable[[str], None]
    trace: Path | None = None
    outcome: Outcome = field(default_factory=Outcome)
    note: Callable[[str, Seconds], None] = lambda what, seconds: None


@dataclass(frozen=True, slots=True)
class Bench:
    """A workload.

    Attributes
    ----------
    name, title : str
        How it is called, and what it does in a line.
    needs : callable
        What it needs at a size.
    run : callable
        Measures it.
    method : str
        How it is measured, for the report: what is done, what it is compared with and how that is set up.
    behind : str
        Where it is known to fall behind what it is compared with, and what is known of the reason, for the report. No figures:
        those are in the tables.
    apart : bool
        Not part of `all`, since what it needs has to be set up first, or it takes long: run by its name only.
    """

    name: str
    title: str
    needs: Callable[[Size], Needs]
    run: Callable[[Context], Outcome]
    method: str = ""
    behind: str = ""
    apart: bool = False


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share `q` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def pairs(context: Context, what: str, count: int, candidates: Mapping[str, Callable[[], float | None]]) -> Seconds:
    """Run all candidates `count` times, in turns, every other time in reverse order; return their seconds, run by run.

    A candidate that returns seconds is taken at its word: it has work around what is to be measured.
    """
    seconds: Seconds = {name: [] for name in candidates}
    began = time.perf_counter()
    said = -_QUIET
    for place in range(count):
        for name in candidates if place % 2 == 0 else reversed(list(candidates)):
            gc.collect()
            start = time.perf_counter()
            own = candidates[name]()
            seconds[name].append(time.perf_counter() - start if own is None else own)
        context.note(what, seconds)
        gone = time.perf_counter() - began
        left = gone / (place + 1) * (count - place - 1)
        if gone - said >= _QUIET or place + 1 == count:
            said = gone
            context.say(f"{what}: {place + 1} of {count}" + (f", about {left:.0f} s left" if left >= 1 else ""))
    return seconds
