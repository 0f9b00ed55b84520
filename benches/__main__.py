"""`python -m benches list`, `python -m benches run NAME... [--quick]` and `python -m benches report`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benches import results
from benches.doubts import doubts_before
from benches.harness import SIZES, Bench, Size
from benches.machine import Machine
from benches.measure import Measurements, check_writable
from benches.report import ReportError, write_report
from benches.scratch import ScratchError, scratch
from benches.workloads import BENCHES

__all__ = ["main"]

# numbers of the process's end
_WRONG_USE, _FAILED, _INTERRUPTED = 2, 1, 130


class _UsageError(Exception):
    """What was asked for can't be done; the message says why and what to do."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benches", description="Measure kvstore on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the benchmarks")
    run = commands.add_parser("run", help="run benchmarks")
    run.add_argument("names", nargs="+", metavar="NAME", help="benchmarks to run, or 'all'")
    run.add_argument("--quick", action="store_true", help="a small size, for a first look (seconds)")
    run.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    run.add_argument("--dir", type=Path, help="where to make the scratch directory (default: .bench, never on tmpfs)")
    named = os.environ.get("KVSTORE_TRACE")
    run.add_argument(
        "--trace",
        type=Path,
        default=Path(named) if named else None,
        metavar="FILE",
        help="requests for `trace` to replay (default: what KVSTORE_TRACE names, else made-up ones)",
    )
    run.add_argument("--results", type=Path, default=results.RESULTS, help="where the JSON files go (default: .bench)")
    report = commands.add_parser("report", help="write docs/benchmarks.md and its plots from the results")
    report.add_argument("--results", type=Path, default=results.RESULTS, help="where the JSON files are (default: .bench)")
    report.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"), help="what to write (default: docs/benchmarks.md)")
    report.add_argument("--notes", type=Path, help="a page to put in, word for word (default: notes-on-NAME beside the output)")
    report.add_argument("--readme", type=Path, help="a page whose marked region is to show the main figures as well")
    report.add_argument("--demo", type=Path, nargs="*", default=[], metavar="JSON", help="results of `make demo` for that region")
    return parser


def _chosen(names: Sequence[str]) -> list[Bench]:
    unknown = [name for name in names if name not in BENCHES and name != "all"]
    if unknown:
        raise _UsageError(f"there is no benchmark {', '.join(map(repr, unknown))}; there are {', '.join(BENCHES)}, and all")
    if "all" in names:
        return [bench for bench in BENCHES.values() if not bench.apart or bench.name in names]
    return [BENCHES[name] for name in dict.fromkeys(names)]


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> int:
    size: Size = options.size or ("quick" if options.quick else "full")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    chosen = _chosen(options.names)
    if options.trace is not None and not options.trace.is_file():
        raise _UsageError(f"there is no file {options.trace} to replay; name one with --trace, or unset KVSTORE_TRACE")
    reason = check_writable(options.results)
    if reason is not None:
        raise _UsageError(reason)
    with scratch(options.dir, results.RESULTS) as directory:
        machine = Machine.look(directory)
        print("\n".join(machine.lines()))
        print(f"scratch      {directory}, removed afterwards", flush=True)
        for doubt in doubts_before(machine, directory, 0):
            print(f"doubt        {doubt}", flush=True)
        measurements = Measurements(size, directory, options.results, machine, options.trace)
        measurements.run(chosen)
    if measurements.failed:
        print(f"benches: {len(measurements.failed)} of {len(chosen)} have no complete result:", file=sys.stderr)
        for name, why in measurements.failed.items():
            print(f"  {name} {why}", file=sys.stderr)
        return _FAILED
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "list":
                width = max(map(len, BENCHES))
                for bench in BENCHES.values():
                    print(f"{bench.name:{width}}  {bench.title}" + (" (not part of all)" if bench.apart else ""))
                return 0
            case "report":
                for line in write_report(options.results, options.out, options.notes, options.readme, options.demo):
                    print(line, flush=True)
                return 0
            case _:
                return _run(options)
    except (_UsageError, ScratchError, ReportError) as error:
        print(f"benches: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("benches: interrupted; the scratch directory is removed, what was measured is kept", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        print(f"benches: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
