"""How far a run is: a line that is kept up to date on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress"]


class _Plain:
    """A line for each thing said."""

    def say(self, text: str) -> None:
        print(f"    {text}", file=sys.stderr, flush=True)

    def tick(self) -> None:
        pass


class _Live:
    """One line, drawn anew when something is said, and once a second: nothing is to be awake beside what is measured."""

    def __init__(self, bars: Any, expected: float | None) -> None:
        self._bars, self._expected = bars, expected
        self._began = time.monotonic()
        self._text = "starting"
        for task in bars.task_ids:
            bars.remove_task(task)
        self._task = bars.add_task("", total=expected)

    def say(self, text: str) -> None:
        self._text = text
        self.tick()

    def tick(self) -> None:
        from rich.markup import escape

        gone = time.monotonic() - self._began
        left = ""
        if self._expected is not None and gone < self._expected:
            left = f", about {_minutes(self._expected - gone)} left of this benchmark"
        text = escape(f"{self._text}  ({_minutes(gone)}{left})")
        completed = min(gone, self._expected) if self._expected is not None else 0.0
        self._bars.update(self._task, description=text, completed=completed, refresh=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class Progress:
    """Shows workload after workload."""

    def __init__(self) -> None:
        self._bars: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn
                from rich.progress import Progress as Bars
            except ImportError:
                return
            self._bars = Bars(
                TextColumn("  "),
                BarColumn(20),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
            )

    @contextmanager
    def showing(self, expected: float | None) -> Iterator[_Plain | _Live]:
        """Show one workload, which took `expected` seconds when it ran before; the line is gone afterwards."""
        if self._bars is None:
            screen = _Plain()
            if expected is not None and expected >= 1:
                screen.say(f"about {_minutes(expected)}, as long as the last time")
            yield screen
            return
        with self._bars:
            yield _Live(self._bars, expected)
