"""Run the demo: `python -m benches.demo [--quick] [--length N] [--out DIR] [--keep]`."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benches.children import Progress as Tick
from benches.demo.chart import draw
from benches.demo.children import DemoError
from benches.demo.prompts import LONGEST, SHORTEST
from benches.demo.report import machine, record, summary, table
from benches.demo.run import run
from benches.demo.text import STORIES, Story
from benches.demo.verdict import failures
from benches.llamacpp import DriverError
from kvstore.errors import KVStoreError

__all__ = ["main"]

_LENGTH, _QUICK = 3000, 1000


class _Terminal:
    """Lines for everybody; a progress bar where there is a terminal, a line a second where there is none."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, soft_wrap=True, width=110)  # a log has no edge to wrap at

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def reading(self, what: str) -> Iterator[Tick]:
        if self.console.is_terminal:
            columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as bars:
                task = bars.add_task(escape(what), total=None)
                yield lambda done, total: bars.update(task, completed=done, total=total)
            return
        said = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal said
            if done < total and time.monotonic() - said > 1:
                said = time.monotonic()
                self.say(f"    {what}: {done} of {total}")

        yield tick


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that a polite kill cleans up just as Ctrl-C does


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.demo", description="Three sessions survive a restart, bit for bit.")
    parser.add_argument("--quick", action="store_true", help=f"prompts of {_QUICK} tokens: under two minutes on two idle cores")
    parser.add_argument("--length", type=int, help=f"tokens of a first prompt, {SHORTEST} to {LONGEST} (default {_LENGTH})")
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="where result.json and ttft.png go (default .demo)")
    parser.add_argument("--keep", action="store_true", help="keep the store, with its damaged block, in the output directory")
    options = parser.parse_args(argv)
    if options.length is None:
        options.length = _QUICK if options.quick else _LENGTH
    if not SHORTEST <= options.length <= LONGEST:
        parser.error(f"--length must be {SHORTEST} to {LONGEST}, got {options.length}")
    return options


def main(argv: Sequence[str] | None = None, stories: Sequence[Story] = STORIES) -> int:
    """Run the demo; return 0 when everything was as it must be, 1 when it was not (and say why), 130 when interrupted."""
    options = _options(argv)
    screen = _Terminal()
    handler = signal.signal(signal.SIGTERM, _stop)
    scratch: Path | None = None
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="store-", dir=options.out))
        return _demo(options, stories, scratch, screen)
    except (DemoError, DriverError, KVStoreError, OSError) as error:
        screen.say(f"[bold red]The demo could not be carried out:[/bold red] {escape(f'{type(error).__name__}: {error}')}")
        return 1
    except KeyboardInterrupt:
        screen.say("interrupted")
        return 130
    finally:
        if scratch is not None and not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
        signal.signal(signal.SIGTERM, handler)


def _demo(options: argparse.Namespace, stories: Sequence[Story], scratch: Path, screen: _Terminal) -> int:
    begin = time.monotonic()
    on = machine()
    screen.say(f"{on['model']} by {on['engine']} on {on['cores']} cores of {on['cpu']}, load {on['load_average']}")
    if isinstance(on["load_average"], float) and on["load_average"] > 0.5:
        screen.say("[yellow]the machine is not idle; times will be longer than they need be[/yellow]")
    result = run(stories, options.length, scratch / "store", screen)
    result.seconds["total"] = time.monotonic() - begin
    wrong = failures(result)
    written = record(result, wrong)
    (options.out / "result.json").write_text(json.dumps(written, indent=2) + "\n")
    draw(written, options.out / "ttft.png")
    screen.say("")
    screen.console.print(table(result))
    for line in summary(result):
        screen.say(escape(line))
    screen.say(escape(f"{result.seconds['total']:.0f} s in all; {options.out / 'result.json'}, {options.out / 'ttft.png'}"))
    for reason in wrong:
        screen.say(f"[bold red]FAILED[/bold red] {escape(reason)}")
    if not wrong:
        screen.say(
            "[bold green]Every promoted turn is equal to the uninterrupted one: answer, whole state, first logits.[/bold green]"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
