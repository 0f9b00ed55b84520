"""`python -m benches list` and `python -m benches run NAME... [--quick]`."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benches import results
from benches.harness import SIZES, Bench, Context, Interrupted, Outcome, Size
from benches.machine import MEMORY_FILE_SYSTEMS, Machine, Usage, doubts_before, file_system
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
    run.add_argument("--results", type=Path, default=results.RESULTS, help="where the JSON files go (default: .bench)")
    return parser


def _chosen(names: Sequence[str]) -> list[Bench]:
    if "all" in names:
        return list(BENCHES.values())
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise _UsageError(f"there is no benchmark {', '.join(map(repr, unknown))}; there are {', '.join(BENCHES)}, and all")
    return [BENCHES[name] for name in dict.fromkeys(names)]


@contextmanager
def _scratch(directory: Path | None) -> Iterator[Path]:
    """A directory that is gone afterwards, whatever happens."""
    asked = directory is not None
    parent = directory or results.RESULTS
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not asked and file_system(parent)[0] in MEMORY_FILE_SYSTEMS:
            raise _UsageError(
                f"{parent.resolve()} is on {file_system(parent)[0]}, where nothing reaches a disk; say --dir to choose a directory "
                "(this one too, if you mean it)"
            )
        made = Path(tempfile.mkdtemp(prefix="scratch-", dir=parent)).resolve()
    except OSError as error:
        raise _UsageError(f"no scratch directory can be made in {parent}: {error.strerror}; choose one with --dir") from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _say(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)


def _run_one(bench: Bench, size: Size, machine: Machine, scratch: Path, directory: Path) -> None:
    needs = bench.needs(size)
    free = shutil.disk_usage(scratch).free
    if free < needs.disk:
        raise _UsageError(
            f"{bench.name} needs {needs.disk / 1e9:.1f} GB of disk, {scratch.parent} has {free / 1e9:.1f} GB free; "
            "use --dir or --quick"
        )
    if machine.memory_bytes < needs.memory:
        raise _UsageError(
            f"{bench.name} needs {needs.memory / 1e9:.1f} GB of memory, the machine has {machine.memory_bytes / 1e9:.1f} GB; "
            "use --quick"
        )
    print(f"{bench.name}: {bench.title}" + ("" if size == "full" else f" (size: {size})"), flush=True)
    doubts = doubts_before(machine, scratch, needs.memory)
    own = scratch / bench.name
    own.mkdir()
    usage, start = Usage(), time.perf_counter()

    def show(outcome: Outcome) -> None:
        outcome.doubts = doubts + outcome.doubts + usage.doubts(machine.cores)
        path = results.write(directory, bench.name, size, machine, time.perf_counter() - start, outcome)
        print("\n".join(results.describe(outcome, size)))
        print(f"  written to {path}", flush=True)

    try:
        outcome = bench.run(Context(own, size, _say))
    except Interrupted as stop:
        show(stop.args[0])
        raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    show(outcome)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the process's exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "list":
        width = max(map(len, BENCHES))
        for bench in BENCHES.values():
            print(f"{bench.name:{width}}  {bench.title}")
        return 0
    size: Size = options.size or ("quick" if options.quick else "full")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)
    try:
        chosen = _chosen(options.names)
        with _scratch(options.dir) as scratch:
            machine = Machine.look(scratch)
            print("\n".join(machine.lines()))
            print(f"scratch      {scratch}, removed afterwards", flush=True)
            for bench in chosen:
                _run_one(bench, size, machine, scratch, options.results)
    except _UsageError as error:
        print(f"benches: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("benches: interrupted; the scratch directory is removed, finished benchmarks have their results", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        print(f"benches: {error}", file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
