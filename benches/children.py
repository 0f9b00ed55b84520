"""Child processes of whoever measures: started, asked by lines of JSON, and always ended.

A child reads requests from its stdin, each ``{"op": name, ...}``, and answers with events on its stdout: any number of
``{"event": "progress", "done": n, "total": m}``, then one that ends the answer. It ends when its stdin does, so it never outlives
who started it. `benches.serving.serve` is its side. The classes that inherit from `Child` say what kinds of children there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

__all__ = ["Child", "ChildError", "Progress", "Worker", "how_it_ended"]

Progress = Callable[[int, int], None]
_WIDTH = 200  # characters of a line of stderr in a message


def how_it_ended(status: int) -> str:
    """A process's end in words, by its exit status as `subprocess` has it: its code, or the signal that ended it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return name + ("; the system does that where memory runs out" if -status == signal.SIGKILL else "")


class ChildError(OSError):
    """A process of a workload failed or died; the message has its last words."""


class Child:
    """One process. Leaving the `with` block ends it: by the end of its stdin, or, on an error or Ctrl-C, at once.

    Parameters
    ----------
    command : sequence of str
        What to run.
    name : str
        For messages.
    patience : float, optional
        Seconds that it may be silent when it was asked something; by default any time.
    environment : mapping of str to str, optional
        Added to the environment.
    directory : Path, optional
        Where it runs; by default here.

    Attributes
    ----------
    hello : dict
        What it said when it was ready, if its kind says anything.
    """

    failure: ClassVar[type[Exception]] = ChildError
    """Raised where it fails, dies, or is too late."""
    greets: ClassVar[bool] = False
    """Whether it says that it is ready before it is asked anything; entering the `with` block waits for that."""
    group: ClassVar[bool] = False
    """Whether it has a process group of its own, all of which is ended with it. A terminal's Ctrl-C does not reach that."""
    strict: ClassVar[bool] = True
    """Whether ending with another status than 0, or not at all, is a failure."""
    traces: ClassVar[bool] = True
    """Whether an error that it reports comes with the end of its stderr."""
    farewell: ClassVar[float] = 60.0
    """Seconds to end by itself."""
    words: ClassVar[int] = 25
    """Lines of its stderr in a message."""

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        patience: float | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.patience = patience
        self.hello: dict[str, Any] = {}
        self._pending = b""
        self._asked = "start"
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in _end)
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=directory,
                env={**os.environ, **(environment or {})},
                start_new_session=self.group,
            )
        except BaseException:
            self._errors.close()
            raise

    @property
    def pid(self) -> int:
        """The process id, and that of its group if it has one of its own."""
        return self._process.pid

    def __enter__(self) -> Self:
        if self.greets:
            try:
                self.hello = self.receive()
            except BaseException:
                self._end(kill=True)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(kill=kind is not None)

    def ask(self, op: str, progress: Progress | None = None, /, **arguments: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        Exception
            Of the kind that `failure` names: it reports an error, dies, or is silent for longer than it may.
        """
        self.send(op, **arguments)
        return self.receive(progress)

    def send(self, op: str, /, **arguments: object) -> None:
        """Send a request; its answer has to be received before the next one."""
        assert self._process.stdin is not None
        self._asked = op
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self, progress: Progress | None = None) -> dict[str, Any]:
        """Wait for the answer to what was sent."""
        while True:
            line = self._line()
            try:
                event: dict[str, Any] = json.loads(line)
                kind = event.pop("event")
            except (ValueError, KeyError, AttributeError, TypeError):
                raise self.failure(f"{self.name} answered with {line[:80]!r}, which is not the protocol") from None
            if kind == "error":
                raise self._fails(f"failed in {self._asked}: {event['message']}", self.traces)
            if kind != "progress":
                return event
            if progress is not None:
                progress(event["done"], event["total"])

    def _line(self) -> bytes:
        """Read a line, waiting no longer than `patience`."""
        assert self._process.stdout is not None
        deadline = None if self.patience is None else time.monotonic() + self.patience
        fd = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([fd], [], [], left)[0]:
                raise self._fails(f"did not answer to {self._asked} within {self.patience:.0f} s; it was ended")
            got = os.read(fd, 1 << 16)
            if not got:
                raise self._died()
            self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _died(self) -> Exception:
        try:
            self._process.wait(timeout=self.farewell)
        except subprocess.TimeoutExpired:
            return self._fails("does not answer any more, and did not end; it was ended")
        return self._fails(f"died ({how_it_ended(self._process.returncode)})")

    def _fails(self, what: str, words: bool = True) -> Exception:
        self._errors.seek(0)
        lines = [line.rstrip()[:_WIDTH] for line in self._errors.readlines()[-self.words :]] if words else []
        return self.failure("\n".join([f"{self.name} {what}", *lines]))

    def _end(self, *, kill: bool) -> None:
        """End the process, and its group, and wait. One that does not end by itself in time is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = False
        try:
            try:
                if kill:
                    self._kill()
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=self.farewell)
                late = self._process.returncode is None
            finally:  # also what a process that has ended itself has left behind in its group
                self._kill()
                self._process.wait()
            if self.strict and not kill and late:
                raise self._fails(f"did not end within {self.farewell:.0f} s; it was killed")
            if self.strict and not kill and self._process.returncode != 0:
                raise self._died()
        finally:
            self._process.stdout.close()
            self._errors.close()

    def _kill(self) -> None:
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()


class Worker(Child):
    """A process of a workload.

    Parameters
    ----------
    module : str
        What `python -m` is to run.
    """

    def __init__(self, module: str) -> None:
        super().__init__([sys.executable, "-m", module], "a process of the benchmark")
