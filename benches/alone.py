"""One workload in a process of its own, which the runner starts: `python -m benches.alone REQUEST`.

So a workload that crashes takes nothing with it, finds memory that nobody used before it, and leaves no thread behind. It tells the
runner what it measured as it goes, a line of JSON at a time through a pipe.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benches import results
from benches.harness import Context, Outcome, Seconds, Size, Unavailable
from benches.workloads import BENCHES

__all__ = ["Request"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What the child is asked for. Everything in it is plain JSON.

    Attributes
    ----------
    name, size : str
    scratch : str
        The workload's own directory.
    trace : str or None
        A file of requests to replay, if one was named.
    channel : int
        The file descriptor to answer by.
    runner : int
        The process that asks. The child doesn't outlive it.
    """

    name: str
    size: Size
    scratch: str
    trace: str | None
    channel: int
    runner: int

    def command(self) -> list[str]:
        """What starts the child."""
        return [sys.executable, "-m", "benches.alone", json.dumps(asdict(self))]


class _Channel:
    """Lines to the runner. Where it is gone, so is the reason to go on."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._file = os.fdopen(fd, "w", encoding="utf-8")

    def send(self, kind: str, what: Any) -> None:
        json.dump({kind: what}, self._file, default=_plain)
        self._file.write("\n")
        self._file.flush()

    def say(self, text: str) -> None:
        self.send("say", text)

    def note(self, what: str, seconds: Seconds) -> None:
        self.send("note", [what, seconds])


class _Logged(logging.Handler):
    """Keeps the last fault that the library logged: a tier counts it and goes on, where a workload then finds something missing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
        print(f"{record.levelname} {record.name}: {self.last}", file=sys.stderr)


def _plain(value: Any) -> Any:
    """numpy's numbers as JSON's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a figure can't be {type(value).__name__}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _die_with(runner: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != runner:
        raise KeyboardInterrupt


def _main(text: str) -> int:
    request = Request(**json.loads(text))
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # who started the runner may have it ignored
    _die_with(request.runner)
    channel, logged = _Channel(request.channel), _Logged()
    logging.getLogger("kvstore").addHandler(logged)
    outcome = Outcome()
    try:
        trace = None if request.trace is None else Path(request.trace)
        context = Context(Path(request.scratch), request.size, channel.say, trace, outcome=outcome, note=channel.note)
        outcome = BENCHES[request.name].run(context)
        channel.send("outcome", results.encode(outcome))
        channel.send("done", True)
    except Unavailable as error:
        channel.send("unavailable", str(error))
        return 1
    except BaseException as error:
        channel.send("outcome", results.encode(outcome))
        why = f"{type(error).__name__}: {error}" + (f"; kvstore logged: {logged.last}" if logged.last else "")
        channel.send("failure", "interrupted" if isinstance(error, KeyboardInterrupt) else why)
        channel.send("traceback", traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
