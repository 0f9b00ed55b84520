"""Running one workload in a child process, and ending it with all that it started, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benches import results
from benches.alone import Request
from benches.children import how_it_ended
from benches.harness import Outcome, Size

__all__ = ["Ended", "Screen", "run"]

_TICK = 1.0  # seconds between two looks at the clock where the child says nothing
_GRACE = 10.0  # seconds for an interrupted child to end what it started
_MARK = "KVSTORE_BENCH_RUN"  # in the environment of a workload and of all that it starts
_TAIL = 12  # lines of what it printed


class Screen(Protocol):
    """Who shows how far a workload is."""

    def say(self, text: str) -> None:
        """Show a line of progress."""

    def tick(self) -> None:
        """Time went by."""


@dataclass(slots=True)
class Ended:
    """How a workload ended.

    Attributes
    ----------
    outcome : dict
        What it measured, as `results.encode` makes it; where it broke off, what there was until then.
    measured : dict
        Seconds of each comparison, as far as it came.
    failure : str or None
        Why it broke off.
    traceback : str or None
        Where, if it could still say.
    printed : list of str
        The end of what it printed, if it broke off.
    available : bool
        False where it could not start, since something that it needs isn't on this machine.
    done : bool
        Whether it came to its end.
    interrupted : bool
        Whether it broke off by this process, on Ctrl-C.
    """

    outcome: dict[str, Any] = field(default_factory=lambda: results.encode(Outcome()))
    measured: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    traceback: str | None = None
    printed: list[str] = field(default_factory=list)
    available: bool = True
    done: bool = False
    interrupted: bool = False


class _Listener:
    """Reads the child's lines until it is gone, and for no longer: what it started may still hold the pipe's other end."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, screen: Screen, ended: Ended) -> None:
        self._process, self._fd, self._screen, self._ended = process, fd, screen, ended
        self._rest = b""
        os.set_blocking(fd, False)
        self._gone = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        for each in (fd, self._gone):
            self._selector.register(each, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()
        os.close(self._gone)

    def until_gone(self, deadline: float | None = None) -> bool:
        """Listen until the child is gone; return whether it is, at a deadline (of time.monotonic)."""
        while deadline is None or time.monotonic() < deadline:
            ready = {key.fd for key, _ in self._selector.select(_TICK if deadline is None else 0.1)}
            if self._fd in ready and not self._drain():
                self._selector.unregister(self._fd)
            if self._gone in ready:
                with contextlib.suppress(OSError):
                    while self._drain():
                        pass
                return True
            self._screen.tick()
        return False

    def _drain(self) -> bool:
        """Take what there is; return False at the end of the pipe, or where nothing is there any more."""
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        ((kind, what),) = message.items()
        match kind:
            case "say":
                self._screen.say(what)
            case "note":
                self._ended.measured[what[0]] = what[1]
            case "outcome":
                self._ended.outcome = what
            case "done":
                self._ended.done = True
            case "failure":
                self._ended.failure = what
            case "unavailable":
                self._ended.failure, self._ended.available = what, False
            case "traceback":
                self._ended.traceback = what


def _kill_family(mark: bytes) -> None:
    """Kill what has a mark in its environment, as all have that a marked process started, and again what came meanwhile.

    Neither parents nor sessions tell: whoever is left over by a process that died belongs to init.
    """
    seen: set[int] = set()
    while found := {pid for pid in _pids() if pid not in seen and mark in _environment(pid)}:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        seen |= found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):  # gone, or somebody else's
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _why(status: int) -> str:
    """What a child's exit status says, where it could not say so itself."""
    if status >= 0:
        return f"its process ended with status {status} and no result"
    return f"its process crashed, or was ended from outside: {how_it_ended(status)}"


def _listen(listener: _Listener, process: subprocess.Popen[bytes], ended: Ended) -> None:
    try:
        listener.until_gone()
    except KeyboardInterrupt:
        ended.interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
            listener.until_gone(time.monotonic() + _GRACE)


def run(name: str, size: Size, scratch: Path, trace: Path | None, screen: Screen) -> Ended:
    """Run a workload in a child process, and come back when that is gone with everything that it started.

    Ctrl-C while it runs interrupts it, waits a few seconds until it has ended what it started, and kills what is left then; a
    second one kills at once. What was measured until then is returned, with `interrupted`.
    """
    ended = Ended()
    reading, writing = os.pipe()
    log = scratch.with_suffix(".log")
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        request = Request(name, size, str(scratch), None if trace is None else str(trace), writing, os.getpid())
        with log.open("wb") as output:
            process = subprocess.Popen(
                request.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
                env={**os.environ, _MARK: mark},
            )
        try:
            os.close(writing)
            writing = -1
            with contextlib.closing(_Listener(process, reading, screen, ended)) as listener:
                _listen(listener, process, ended)
        finally:
            process.kill()
            status = process.wait()
            _kill_family(f"{_MARK}={mark}".encode())
        if ended.interrupted:
            ended.failure = "interrupted"
        elif not ended.done:
            ended.failure = ended.failure or _why(status)
        if ended.failure is not None:
            ended.printed = log.read_text(errors="replace").splitlines()[-_TAIL:]
        return ended
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
        log.unlink(missing_ok=True)
