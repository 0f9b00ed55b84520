"""Processes that a workload measures in: started, asked in JSON lines, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

__all__ = ["Child", "ChildError", "serve"]

Operation = Callable[..., dict[str, Any]]


class ChildError(OSError):
    """A process of a workload failed or died; the message has its last words."""


class Child:
    """A process that runs a module which calls `serve`. Leaving the `with` block ends it.

    It ends by the end of its stdin, so it never outlives the benchmark; after an error, or when it does not end, it is killed.

    Parameters
    ----------
    module : str
        What `python -m` is to run.
    """

    def __init__(self, module: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except BaseException:
            self._errors.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if kind is not None:
                self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                code = self._process.wait(timeout=60)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
            if kind is None and code != 0:
                raise self._dead()
        finally:
            self._process.stdout.close()
            self._errors.close()

    def ask(self, op: str, /, **arguments: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        ChildError
            When the process reports an error, or dies.
        """
        self.send(op, **arguments)
        return self.receive()

    def send(self, op: str, /, **arguments: object) -> None:
        """Send a request; its answer has to be received before the next one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the answer to what was sent."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._dead()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"a process of the benchmark failed: {answer['error']}\n{self._last_words()}")
        return answer

    def _dead(self) -> ChildError:
        return ChildError(f"a process of the benchmark died (exit code {self._process.wait()})\n{self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-25:])


def serve(operations: Mapping[str, Operation]) -> int:
    """Answer requests until stdin ends; what the operations print goes to stderr. Returns the process's exit status."""
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            channel.write(json.dumps(operations[request.pop("op")](**request)) + "\n")
    except (KeyboardInterrupt, BrokenPipeError):
        return 130  # the benchmark is going away, and says so itself
    except Exception as error:  # the benchmark reports it, whatever it is
        traceback.print_exc()
        channel.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return 1
    return 0
