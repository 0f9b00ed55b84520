"""Processes of a workload: their errors are told, and none is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benches import pagecache
from benches.children import ChildError, Worker, how_it_ended
from benches.direct import Way, read_all, write_all
from benches.filling import fill
from benches.sessions import arrays_for, random_tokens, small_layout
from kvstore import Store

_MODULE = """
import contextlib, os, sys, time
from benches.serving import serve
def fail(): raise ValueError("so it is")
def crash(): os.kill(os.getpid(), 11)
def die(): print("last words", file=sys.stderr, flush=True); os._exit(7)
def say(text): print("noise"); return {"said": text, "pid": os.getpid()}
def linger(): import atexit; atexit.register(time.sleep, 600); return {}
def close(): os.closerange(0, 1000); time.sleep(600)
def spoil(): import atexit; atexit.register(os._exit, 9); return {}
sys.exit(serve(lambda send: contextlib.nullcontext({f.__name__: f for f in (fail, die, crash, say, linger, close, spoil)})))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that child processes can run."""
    (tmp_path / "bench_child.py").write_text(_MODULE)
    paths = [str(tmp_path), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "bench_child"


def test_a_child_answers(module: str) -> None:
    """Answers come from another process, whatever it prints, and it ends by itself."""
    with Worker(module) as child:
        assert child.ask("say", text="x") == {"said": "x", "pid": child.pid}
        assert child.pid != os.getpid()
        pid = child.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("fail", "failed in fail: ValueError: so it is"),
        ("die", "(?s)exit code 7.*last words"),
        ("what", "failed in what: KeyError"),
        ("crash", "died .SIGSEGV."),
    ],
)
def test_a_childs_fault_is_told(op: str, says: str, module: str) -> None:
    """An error or a death in a child is an error here that has its last words."""
    with pytest.raises(ChildError, match=says), Worker(module) as child:
        child.ask(op)
    assert not Path(f"/proc/{child.pid}").exists()


def test_an_error_ends_the_children(module: str) -> None:
    """When the benchmark fails, or is interrupted, its children are gone with it, busy or not."""
    with pytest.raises(KeyboardInterrupt), Worker(module) as child:
        child.ask("say", text="x")
        raise KeyboardInterrupt
    assert not Path(f"/proc/{child.pid}").exists()


def test_ends_have_names() -> None:
    """A status is told as its code or its signal; of SIGKILL, what it often means."""
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-11) == "SIGSEGV"
    assert how_it_ended(-60) == "signal 60"
    assert "memory runs out" in how_it_ended(-9)


class Hasty(Worker):
    """A process that is not waited for long."""

    farewell = 0.3


@pytest.mark.parametrize(
    ("op", "says"), [("linger", "did not end within 0 s; it was killed"), ("spoil", "died .exit code 9"), ("close", "did not end")]
)
def test_a_child_that_does_not_end_well_is_told(op: str, says: str, module: str) -> None:
    """One that does not end, ends with another status than 0, or falls silent without ending is an error, and gone."""
    with pytest.raises(ChildError, match=says), Hasty(module) as child:
        child.ask("say", text="x")
        child.ask(op)
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_filled_store_is_one_that_was_saved(tmp_path: Path) -> None:
    """Sessions that were put into a store many at once verify, and come back as any others."""
    layout = small_layout()
    prompts = [np.concatenate([random_tokens(1, 700), random_tokens(10 + n, 400)]) for n in range(40)]
    arrays = arrays_for(layout, 1100)
    with Store.open(tmp_path / "store", max_bytes=64 << 20) as store:
        namespace = store.namespace(layout)
        assert fill(namespace, ((prompt, arrays) for prompt in prompts)) == len(prompts)
        assert store.verify(deep=True).ok
        for prompt in prompts:
            found = {name: np.zeros_like(array) for name, array in arrays.items()}
            with namespace.lease(prompt) as lease:
                assert lease.length == prompt.size
                lease.copy_into(found)
            assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
        assert namespace.save(prompts[0], arrays).new_blocks == 0


@pytest.mark.parametrize("way", [Way(256 << 10, 1, False), Way(1 << 20, 4, True)])
def test_raw_reads_and_writes_move_the_whole_file(way: Way, tmp_path: Path) -> None:
    """Raw writes replace every byte, a piece that isn't whole included, and leave the page cache alone."""
    path, length = tmp_path / "file", (2 << 20) + 12_288
    path.write_bytes(b"\0" * length)
    assert write_all(path, way, length) > 0
    assert pagecache.drop(path) < 0.01
    assert read_all(path, way, length) > 0
    assert pagecache.resident(path) < 0.01
    assert path.read_bytes() == b"\1" * length
