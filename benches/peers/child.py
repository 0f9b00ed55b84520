"""A peer's process: a driver, asked by JSON lines on stdin, answering by JSON lines on stdout. It ends when its stdin does.

Run by the peers' own Python as `python -m benches.peers.child DRIVER OPTIONS`; nothing of kvstore is imported here. What each
request does is timed in here, so that the pipe isn't part of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benches.peers.driver import Driver, fsync_all
from benches.peers.shape import Bytes, Session, Shape, wrong_bytes
from benches.serving import Operations, Send, serve

__all__ = ["main"]


def _tree() -> list[int]:
    """This process and all below it."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _written() -> tuple[int, int]:
    """Bytes handed to write calls, and bytes that the kernel counts as written to storage, of this process and all below it."""
    calls = storage = 0
    for pid in _tree():
        with contextlib.suppress(OSError):
            found = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            calls += int(found["wchar"])
            storage += int(found.get("write_bytes", 0))
    return calls, storage


class Server:
    """What a child answers. All seconds are of the driver's work alone."""

    def __init__(self, driver: Driver, shape: Shape) -> None:
        self.driver = driver
        self.shape = shape
        self.directory = Path()
        self.source: list[Bytes] = []
        self.into: list[Bytes] = []

    def open(self, directory: str, tokens: int) -> dict[str, Any]:
        """Open what is in a directory."""
        self.directory = Path(directory)
        start = time.perf_counter()
        self.driver.open(self.directory, tokens)
        return {"seconds": time.perf_counter() - start}

    def close(self) -> dict[str, Any]:
        """Close it."""
        start = time.perf_counter()
        self.driver.close()
        gc.collect()
        return {"seconds": time.perf_counter() - start}

    def make(self, parts: Sequence[Sequence[int]], start: int = 0) -> dict[str, Any]:
        """Make a session's rows from a position on, in the arrays that are saved from."""
        session = Session.of(parts)
        if not self.source or len(self.source[0]) < session.length:
            self.source = self.shape.arrays(session.length)
        session.fill(self.shape, self.source, start)
        return {}

    def save(self, parts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Save a session that was made before; then, apart, make its files durable where the peer hasn't."""
        session = Session.of(parts)
        tokens = session.tokens()
        arrays = [array[: session.length] for array in self.source]
        gc.collect()
        self.driver.before_save(tokens, arrays)
        self.driver.aside = 0.0
        before = _written()
        worked, start = time.process_time(), time.perf_counter()
        self.driver.save(tokens, arrays)
        saved, worked = time.perf_counter(), time.process_time() - worked
        self.driver.settle()
        settled = time.perf_counter()
        if not self.driver.durable:
            fsync_all(self.directory)
        end = time.perf_counter()
        after = _written()
        return {
            "seconds": saved - start,
            "processor": worked,
            "aside": self.driver.aside,
            "settled": settled - saved,
            "synced": end - settled,
            "calls": after[0] - before[0],
            "storage": after[1] - before[1],
        }

    def restore(self, parts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Restore what can be had of a prompt into the engine's arrays."""
        session = Session.of(parts)
        self._room(session.length)
        tokens = session.tokens()
        arrays = [array[: session.length] for array in self.into]
        gc.collect()
        self.driver.before_restore()
        self.driver.aside = 0.0
        worked, start = time.process_time(), time.perf_counter()
        length = self.driver.restore(tokens, arrays)
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        self.driver.after_restore()
        return {"seconds": seconds, "processor": worked, "aside": self.driver.aside, "length": length}

    def check(self, parts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Restore into arrays that hold something else, and compare with what the session's rows are. An error is an answer."""
        session = Session.of(parts)
        self._room(session.length)
        for array in self.into:
            array[: session.length].fill(0xEE)
        self.driver.before_restore()
        arrays = [array[: session.length] for array in self.into]
        try:
            length = self.driver.restore(session.tokens(), arrays)
            self.driver.deliver(arrays, length)
            self.driver.after_restore()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        return {"length": length, "wrong": wrong_bytes(self.shape, session, self.into, length)}

    def _room(self, tokens: int) -> None:
        if not self.into or len(self.into[0]) < tokens:
            self.into = self.shape.arrays(tokens)


def _version(packages: Sequence[str]) -> str:
    found = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


@contextlib.contextmanager
def _serving(send: Send, arguments: Sequence[str]) -> Iterator[Operations]:
    name, raw = arguments
    options = json.loads(raw)
    shape = Shape(**options.pop("shape"))
    packages = options.pop("packages", [])
    driver: Driver = importlib.import_module(f"benches.peers.drivers.{name}").DRIVER(shape, **options)
    send(event="ready", version=_version(packages), durable=driver.durable, reopens=driver.reopens, own=driver.own)
    server = Server(driver, shape)
    try:
        yield {name: getattr(server, name) for name in ("open", "close", "make", "save", "restore", "check")}
    finally:
        driver.close()


def main(arguments: Sequence[str]) -> int:
    """Serve until stdin ends. An error is sent as an event before the process ends with 1."""
    return serve(lambda send: _serving(send, arguments))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of a peer's may never end
