"""Server processes as the demo sees them: started, asked, and always ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Child", "DemoError"]

Progress = Callable[[int, int], None]


class DemoError(RuntimeError):
    """The demo could not be carried out."""


class Child:
    """One server process. Leaving the `with` block ends it: by the end of its stdin, or, on an error, at once.

    Parameters
    ----------
    context : int
        Cells of its engine's KV cache.
    store : path, optional
        The store that it opens.
    max_bytes : int, optional
        The store's cap, for the process that creates it.
    """

    def __init__(self, context: int, *, store: Path | None = None, max_bytes: int | None = None) -> None:
        command = [sys.executable, "-m", "benches.demo.server", "--context", str(context)]
        if store is not None:
            command += ["--store", str(store)]
        if max_bytes is not None:
            command += ["--max-bytes", str(max_bytes)]
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
            )
        except BaseException:
            self._errors.close()
            raise
        self.layout = ""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.layout = self._wait(None)["layout"]
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        code = self._end(kill=kind is not None)
        if kind is None and code != 0:
            raise DemoError(f"a server process ended with {code}")

    def ask(self, op: str, progress: Progress | None = None, /, **arguments: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        DemoError
            When the process reports an error or dies; with the last lines of its stderr.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        return self._wait(progress)

    def _wait(self, progress: Progress | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
            if kind == "progress":
                if progress is not None:
                    progress(event["done"], event["total"])
            elif kind == "error":
                raise DemoError(f"a server process failed: {event['message']}\n{self._last_words()}")
            else:
                return event
        raise self._dead()

    def _dead(self) -> DemoError:
        return DemoError(f"a server process died (exit code {self._process.wait()})\n{self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-25:])

    def _end(self, *, kill: bool) -> int:
        """End the process and wait for it. The wait is bounded: a process that does not end by itself is killed."""
        try:
            if kill:
                self._process.kill()
            elif self._process.stdin is not None:
                self._process.stdin.close()
            try:
                return self._process.wait(timeout=120)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        finally:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None and not stream.closed:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            self._errors.close()
