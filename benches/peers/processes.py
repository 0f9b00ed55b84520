"""A peer's process as the runner sees it: started, asked within a time limit, and always ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Child", "PeerFailed"]

ROOT = Path(__file__).parents[2]
_LAST_WORDS = 6  # lines of stderr in a message
_LINE = 200  # characters of such a line
_FAREWELL = 20.0  # seconds to end by itself


class PeerFailed(RuntimeError):
    """A peer's process crashed, reported an error, or did not answer in time."""


class Child:
    """One process of a peer, in a process group of its own. Leaving the `with` block ends all of it, at once on an error.

    Parameters
    ----------
    command : sequence of str
        What to run.
    name : str
        For messages.
    patience : float
        Seconds that it may take for an answer.
    environment : dict of str to str, optional
        Added to the environment.
    """

    def __init__(self, command: Sequence[str], name: str, patience: float, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.patience = patience
        self._pending = b""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # so that Ctrl-C is the runner's alone, and that the whole group can be ended
            )
        except BaseException:
            self._errors.close()
            raise
        self.hello: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """The process id, and that of its group."""
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.hello = self._wait()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(kill=kind is not None)

    def ask(self, op: str, /, **arguments: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        PeerFailed
            When the process reports an error, dies, or takes longer than it may.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        return self._wait(op)

    def _wait(self, op: str = "start") -> dict[str, Any]:
        line = self._line(op)
        try:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
        except (ValueError, KeyError, AttributeError):
            raise PeerFailed(f"{self.name} answered with {line[:80]!r}, which is not the protocol") from None
        if kind == "error":
            raise PeerFailed(f"{self.name} failed in {op}: {event['message']}")
        return event

    def _line(self, op: str) -> bytes:
        """Read a line, waiting no longer than `patience`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.patience
        fd = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerFailed(
                    f"{self.name} did not answer to {op} within {self.patience:.0f} s; it was ended\n{self._last_words()}"
                )
            got = os.read(fd, 1 << 16)
            if not got:
                raise self._dead()
            self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _dead(self) -> PeerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_FAREWELL)
        return PeerFailed(f"{self.name} died (exit code {self._process.returncode})\n{self._last_words()}".rstrip())

    def _last_words(self) -> str:
        self._errors.seek(0)
        return "\n".join(line.strip()[:_LINE] for line in self._errors.readlines()[-_LAST_WORDS:])

    def _end(self, *, kill: bool) -> None:
        """End the process and its whole group, and wait. One that does not end by itself is killed."""
        try:
            if not kill and self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_FAREWELL)
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what a process that has ended itself has left behind
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None and not stream.closed:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            self._errors.close()
