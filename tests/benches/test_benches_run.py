"""Every benchmark runs at its smallest size, as a test that it works; and what the command line refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benches.__main__ import main
from benches.harness import Target, quantile
from benches.workloads import BENCHES

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.model) if n in ("sharing", "needle") else n for n in BENCHES])
def test_benchmark_runs(name: str, tmp_path: Path, capsys: Capture) -> None:
    """It measures what it says, writes JSON, leaves no scratch."""
    scratch, out = tmp_path / "scratch", tmp_path / "results"
    assert main(["run", name, "--size", "smallest", "--dir", str(scratch), "--results", str(out)]) == 0
    (path,) = out.iterdir()
    record = json.loads(path.read_text())
    assert record["bench"] == name
    assert record["size"] == "smallest"
    assert record["figures"]
    assert record["machine"]["cores"] >= 1
    assert all(isinstance(t["met"], bool) for t in record["targets"])
    assert list(scratch.iterdir()) == []
    printed = capsys.readouterr().out
    for word in ("processor", "memory", "file system", "kernel", "scratch"):
        assert word in printed


def test_list_names_all(capsys: Capture) -> None:
    """`list` has a line for each."""
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHES)


def test_unknown_name_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """An unknown name is named, with those that there are, before anything runs."""
    assert main(["run", "match", "nothing", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "'nothing'" in error
    assert "restore" in error
    assert not list(tmp_path.iterdir())


def test_unwritable_directory_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """A scratch directory that can't be made is a message, not a traceback."""
    (tmp_path / "file").write_text("")
    assert main(["run", "match", "--dir", str(tmp_path / "file"), "--results", str(tmp_path / "r")]) == 2
    assert "--dir" in capsys.readouterr().err


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("name", "children", "number"), [("match", 0, signal.SIGINT), ("match", 0, signal.SIGTERM), ("processes", 5, signal.SIGINT)]
)
def test_interrupt_leaves_nothing(name: str, children: int, number: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle: a message, status 130, the scratch directory and all processes gone."""
    command = [sys.executable, "-m", "benches", "run", name, "--quick", "--dir", str(tmp_path), "--results", str(tmp_path / "r")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while not any(tmp_path.glob(f"scratch-*/{name}/store*")) or len(_children(process.pid)) < children:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = _children(process.pid)
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("scratch-*"))
    while any(Path(f"/proc/{child}").exists() for child in started):  # one that was only starting ends when its stdin does
        assert time.monotonic() < deadline + 40, f"left behind: {started}"
        time.sleep(0.02)


def test_targets_know_their_side() -> None:
    """A limit holds from one side, the limit itself included."""
    assert Target("x", 1.0, 1.0).met
    assert not Target("x", 1.1, 1.0).met
    assert Target("x", 1.1, 1.0, at_most=False).met
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
