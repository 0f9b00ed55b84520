"""What the tests of several packages share: layouts, faults by editing files, child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Layout, Namespace, State, Store, Stream
from kvstore.errors import BlockDamaged
from kvstore.testing import destination, session_rows, session_states, states_equal

SCALE = float(os.environ.get("KVSTORE_TEST_SCALE", "1"))
# the same in every ordinary run; a long one takes its own. Noted in the environment, so that children have it too.
SEED = int(os.environ.setdefault("KVSTORE_TEST_SEED", "1" if SCALE <= 1 else str(int.from_bytes(os.urandom(4), "little"))))
CAP = 16 << 20
ROOT = Path(__file__).resolve().parents[1]


def examples(count: int) -> int:
    """Turn a number of Hypothesis examples into that of this run: KVSTORE_TEST_SCALE multiplies it."""
    return max(1, round(count * SCALE))


def twentieth(count: int) -> int:
    """Turn a count of the long tests (KVSTORE_TEST_SCALE=20) into that of this run."""
    return max(1, round(count * SCALE / 20))


def plain_layout(block_tokens: int = 16, **changes: Any) -> Layout:
    """Give a small layout without states: token axes in front, in the middle and behind, and a strided stream."""
    streams = [
        Stream("k", "f16", (3, 8), 1),
        Stream("v", "u8", (5,)),
        Stream("t", "f32", (4,), 1),
        Stream("pool", "f32", (2,), 0, 4),
    ]
    return Layout(**{"streams": streams, "block_tokens": block_tokens, "model": "plain", **changes})


def hybrid_layout(block_tokens: int = 16, **changes: Any) -> Layout:
    """Give a small layout with states, bounded ones and opaque bytes among them."""
    states = [State("r", "f32", (6, 5)), State("window", "f16", (3, 7), (1,)), State.opaque("blob", 100)]
    streams = [Stream("k", "bf16", (2, 6), 1), Stream("v", "i8", (9,))]
    return Layout(**{"streams": streams, "states": states, "block_tokens": block_tokens, "model": "hybrid", **changes})


def wide_layout(token_bytes: int = 4096, block_tokens: int = 64, **changes: Any) -> Layout:
    """Give a layout whose tokens take many bytes, to fill stores with few tokens."""
    return Layout(**{"streams": [Stream("kv", "u8", (token_bytes,))], "block_tokens": block_tokens, "model": "wide", **changes})


def save(
    namespace: Namespace, tokens: list[int], *, writer: int = 0, start: int = 0, states: bool = True, check: bool = False
) -> Any:
    """Save a made-up session, with states if its layout has any."""
    layout = namespace.layout
    given = session_states(layout, tokens, writer=writer) if states and layout.states else None
    return namespace.save(tokens, session_rows(layout, tokens, writer=writer, start=start), states=given, start=start, check=check)


def restored(namespace: Namespace, tokens: list[int], *, writer: int = 0) -> int:
    """Restore what a lease on a prompt offers and return its length; every byte has to be the one that was saved."""
    layout = namespace.layout
    with namespace.lease(tokens) as lease:
        if not lease:
            return 0
        into = destination(layout, lease.length, spare=3)
        lease.copy_into(into)
        lease.validate()
        expected = session_rows(layout, tokens[: lease.length], writer=writer)
        for stream in layout.streams:
            got = np.take(into[stream.name], range(stream.rows(lease.length)), axis=stream.token_axis)
            assert got.tobytes() == expected[stream.name].tobytes(), stream.name
        if layout.states:
            assert states_equal(lease.states(), session_states(layout, tokens[: lease.length], writer=writer))
        return lease.length


def restored_at_last(namespace: Namespace, tokens: list[int]) -> int:
    """As `restored`, where damage is met: it may be refused, block by block, until what is offered is whole."""
    for _ in range(100):
        try:
            return restored(namespace, tokens)
        except BlockDamaged:
            continue
    raise AssertionError("damage was met a hundred times: it is not refused")


def assert_restores(namespace: Namespace, tokens: list[int], length: int, *, writer: int = 0) -> None:
    """Require that a lease on a prompt is of exactly this length, and that every byte is the one that was saved."""
    assert restored(namespace, tokens, writer=writer) == length


def assert_sound(store: Store) -> None:
    """Require that a deep verification finds nothing."""
    found = store.verify(deep=True)
    assert found.ok, found.problems[:5]
    assert found.deep


def data_file(store: str | os.PathLike[str]) -> Path:
    """Name the data file of a store."""
    return Path(store) / "data.mdb"


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    """Change one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        assert len(old) == 1
        file.seek(offset)
        file.write(bytes([old[0] ^ mask]))
        file.flush()
        os.fsync(file.fileno())


PRELUDE = """
import os, signal, sys, time
import numpy as np
from kvstore import *
from kvstore.testing import *
from tests.support import *
path = sys.argv[1]
"""


def child(code: str, *args: str | os.PathLike[str]) -> subprocess.Popen[str]:
    """Start Python on a piece of code: the prelude above stands in front of it. The caller waits for it or kills it."""
    source = PRELUDE + textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", source, *[os.fspath(arg) for arg in args]]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )


def run_child(code: str, *args: str | os.PathLike[str], timeout: float = 300.0) -> str:
    """Run a piece of code to its end in another process; return what it printed. It must succeed, within `timeout` seconds."""
    process = child(code, *args)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.strip()


@contextmanager
def child_at(code: str, *args: str | os.PathLike[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a piece of code and wait until it prints a line; it is killed in the end if it still runs."""
    process = child(code, *args)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a child and wait until it has stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def wait_until(ready: Any, seconds: float = 30.0) -> None:
    """Wait until something holds; fail if it does not within a generous time."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
