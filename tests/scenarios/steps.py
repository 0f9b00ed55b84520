"""A process that does what it is told, one line at a time, and can be halted at an exact place of what it does."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from pathlib import Path
from types import TracebackType

import numpy as np

from kvstore import Layout, Namespace, State, Store, Stream
from kvstore.testing import destination, session_rows
from tests.support import assert_sound, child, stop

PATIENCE = 120.0  # seconds: what takes longer hangs

BIG = Layout(
    (Stream("k", "u8", (64,)),),
    (State("big", "u8", (1536 << 10,)), State("small", "f32", (5,))),
    block_tokens=16,
    model="big",
)
"""States that take several transactions in a store of 16 MiB: two blocks of them, one a transaction."""

_ACTOR = """
import contextlib
from tests.scenarios.steps import BIG

def halt(owner, name, *, call=1, after=False):
    "Halt at a call of `owner.name`, the call-th from now (0: at each of them), until told to go on."
    original, seen = getattr(owner, name), [0]
    def wrapped(*args, **kwargs):
        seen[0] += 1
        here = not call or seen[0] == call
        if here and not after:
            wait_at(name)
        result = original(*args, **kwargs)
        if here and after:
            wait_at(name)
        return result
    setattr(owner, name, wrapped)

def wait_at(name):
    print("at", name, flush=True)
    assert sys.stdin.readline() == "go\\n"

if {opens}:
    store = Store.open(path, lock_timeout=20.0)
{setup}
print("ready", flush=True)
for line in sys.stdin:
    try:
        answer = "did " + repr(eval(line))
    except Exception as error:
        answer = f"failed {{type(error).__name__}}: {{error}}".replace("\\n", " ")
    print(answer, flush=True)
"""


class Actor:
    """A process with the store open as `store`. Killed at the end of the `with` block."""

    def __init__(self, path: Path, setup: str = "", *, opens: bool = True) -> None:
        self.process = child(_ACTOR.format(setup=setup, opens=opens), path)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("ended")

    def __enter__(self) -> Actor:
        self.expect("ready")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next(self) -> str:
        """Give its next line."""
        line = self._lines.get(timeout=PATIENCE)
        if line == "ended":
            assert self.process.stderr is not None
            raise AssertionError(f"the process ended: {self.process.stderr.read()}")
        return line

    def expect(self, line: str) -> None:
        """Wait until it says this."""
        found = self.next()
        assert found == line, found

    def start(self, expression: str) -> None:
        """Tell it what to do."""
        self._say(expression)

    def until(self, name: str) -> None:
        """Wait until it halts there."""
        self.expect(f"at {name}")

    def go(self) -> None:
        """Let it go on where it has halted."""
        self._say("go")

    def answer(self) -> str:
        """Wait until it has done what it was told; gives what came of it."""
        line = self.next()
        assert line.startswith("did "), line
        return line[4:]

    def failure(self) -> str:
        """Wait until it has failed to; gives the error."""
        line = self.next()
        assert line.startswith("failed "), line
        return line[7:]

    def do(self, expression: str) -> str:
        """Tell it what to do, and wait for it."""
        self.start(expression)
        return self.answer()

    def stop(self) -> None:
        """Stop it as it stands, as SIGSTOP does."""
        stop(self.process)

    def go_on(self) -> None:
        """End that."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as it stands."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it was told last and never read
                pipe.close()


def assert_written_by(namespace: Namespace, tokens: list[int], spans: list[tuple[int, int]]) -> None:
    """Require that a whole prompt is restored, and who wrote which rows: spans are (end, writer), in order.

    A row that stands for several positions is of who computed the last of them.
    """
    layout = namespace.layout
    with namespace.lease(tokens) as lease:
        assert lease.length == len(tokens) == spans[-1][0]
        into = destination(layout, lease.length)
        lease.copy_into(into)
        lease.validate()
    of = {writer: session_rows(layout, tokens, writer=writer) for _, writer in spans}
    for stream in layout.streams:
        rows = np.moveaxis(into[stream.name], stream.token_axis, 0)
        for row in range(stream.rows(len(tokens))):
            last = (row + 1) * stream.tokens_per_row
            writer = next(writer for end, writer in spans if last <= end)
            right = np.moveaxis(of[writer][stream.name], stream.token_axis, 0)[row]
            assert rows[row].tobytes() == right.tobytes(), (stream.name, row, writer)


def blocks_in(store: Store) -> int:
    """How many blocks there are, once everything agrees."""
    assert_sound(store)
    return store.stats().blocks
