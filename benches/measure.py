"""Running workloads one after another: what each needs, how far it is, what is kept of it."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benches import results, runner
from benches.doubts import Usage, doubts_before
from benches.harness import Bench, Size
from benches.machine import Machine
from benches.progress import Progress

__all__ = ["Measurements", "check_writable"]


_RESULT = 1 << 20  # bytes: more than a result takes


def _gb(size: int) -> str:
    """Bytes in GB, so that two that differ look different."""
    return f"{size / 1e9:.1f} GB" if size >= 10e9 else f"{size / 1e9:.3g} GB"


def check_writable(directory: Path) -> str | None:
    """Why results can't be written to a directory; None if they can. It is made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_RESULT))
            file.flush()
            return None
    except OSError as error:
        return f"results can't be written to {directory}: {error.strerror}; choose another directory with --results"


def _say(text: str) -> None:
    print(f"benches: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Measurements:
    """Workloads of one size, in one scratch directory, with the directory of their results.

    Attributes
    ----------
    failed : dict of str to str
        Workloads that were not carried out or broke off, with the reason.
    """

    size: Size
    scratch: Path
    directory: Path
    machine: Machine
    trace: Path | None = None
    progress: Progress = field(default_factory=Progress)
    failed: dict[str, str] = field(default_factory=dict)

    def lacks(self, bench: Bench) -> str | None:
        """What of disk or memory a workload would not have; None if it has all."""
        needs = bench.needs(self.size)
        smaller = {"full": "--quick, or ", "quick": "", "smallest": ""}[self.size]
        free = shutil.disk_usage(self.scratch).free
        if free < needs.disk:
            return (
                f"it needs {_gb(needs.disk)} of disk, and {self.scratch.parent} has {_gb(free)} free; "
                f"use {smaller}--dir with a directory on another disk"
            )
        if self.machine.memory_bytes < needs.memory:
            return (
                f"it needs {_gb(needs.memory)} of memory, page cache included, and this machine has, or this "
                f"container may use, {_gb(self.machine.memory_bytes)}; use {smaller}a larger one"
            )
        return None

    def run(self, chosen: Sequence[Bench]) -> None:
        """Run workloads. One that can't be carried out, raises or crashes is named, and the others go on.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C, when the workload under way has ended and what it measured is written.
        """
        for bench in chosen:  # so that nobody waits for an hour to learn it
            reason = self.lacks(bench)
            if reason is not None:
                self._failed(bench, f"not run: {reason}")
        able = [bench for bench in chosen if bench.name not in self.failed]
        for place, bench in enumerate(able):
            self._one(bench, place, len(able))

    def _failed(self, bench: Bench, reason: str) -> None:
        self.failed[bench.name] = reason
        _say(f"{bench.name} {reason}")

    def _one(self, bench: Bench, place: int, count: int) -> None:
        reason = self.lacks(bench)
        if reason is not None:
            self._failed(bench, f"not run: {reason}")
            return
        size = "" if self.size == "full" else f" (size: {self.size})"
        print((f"{place + 1} of {count}, " if count > 1 else "") + f"{bench.name}: {bench.title}{size}", flush=True)
        needs = bench.needs(self.size)
        doubts = doubts_before(self.machine, self.scratch, needs.memory, needs.disk)
        own = self.scratch / bench.name
        own.mkdir()
        usage, start = Usage(), time.perf_counter()
        try:
            with self.progress.showing(results.latest_seconds(self.directory, bench.name, self.size)) as screen:
                ended = runner.run(bench.name, self.size, own, self.trace, screen)
        finally:
            shutil.rmtree(own, ignore_errors=True)
        ended.outcome["doubts"] = doubts + ended.outcome["doubts"] + usage.doubts(self.machine.cores)
        record = results.compose(
            bench.name,
            self.size,
            self.machine,
            time.perf_counter() - start,
            ended.outcome,
            failure=ended.failure,
            measured=ended.measured,
            trace=ended.traceback,
        )
        for line in results.describe(results.decode(ended.outcome), self.size):
            print(line, flush=True)
        kept = ended.failure is None or ended.measured or ended.outcome["figures"] or ended.outcome["tables"]
        if kept:
            try:
                path = results.write(self.directory, record)
                print(
                    f"  {'written' if ended.failure is None else 'what was measured until then is written'} to {path}", flush=True
                )
            except OSError as error:
                self._failed(bench, f"has no result: {self.directory} can't be written to any more: {error.strerror}")
        if ended.interrupted:
            raise KeyboardInterrupt
        if ended.failure is not None:
            for line in ended.printed if ended.traceback is None else ended.traceback.splitlines():
                print(f"  | {line}", file=sys.stderr)
            self._failed(bench, f"{'broke off' if ended.available else 'not run'}: {ended.failure}")
