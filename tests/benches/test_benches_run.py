"""Every benchmark runs at its smallest size, as a test that it works, and is reported; and what the command line refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benches.__main__ import main
from benches.harness import Context, Size, Target, pairs, quantile
from benches.report.numbers import is_ratio
from benches.workloads import BENCHES

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all results of this module."""
    return tmp_path_factory.mktemp("kept")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.model) if n in ("sharing", "needle") else n for n in BENCHES])
def test_benchmark_runs(name: str, tmp_path: Path, kept: Path, capsys: Capture) -> None:
    """It measures what it says, writes JSON, leaves no scratch, and the report shows it."""
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
    page = tmp_path / "page.md"
    assert main(["report", "--results", str(out), "--out", str(page)]) == 0
    text = page.read_text()
    assert f"\n## {name}\n" in text
    for table in record["tables"]:
        assert f"**{table['title']}**" in text
        figures = any(isinstance(value, float) for row in table["rows"] for value in row)
        assert not figures or any(map(is_ratio, table["columns"])), f"{table['title']} compares nothing"
    for plot in record["plots"]:
        assert (tmp_path / "page" / f"{name}-{plot['name']}.png").exists()
    path.rename(kept / path.name)


def test_report_of_all(kept: Path, tmp_path: Path, capsys: Capture) -> None:
    """One page shows all results; if they were of the full size, the README's region would come out of them."""
    if len(list(kept.iterdir())) < len(BENCHES):
        pytest.skip("the tests above, which leave the results, did not all run")
    for path in list(kept.iterdir()):
        path.write_text(path.read_text().replace('"size": "smallest"', '"size": "full"', 1))
        if path.name.startswith("cold-"):
            record = json.loads(path.read_text())
            record["machine"] |= {"device": "another disk", "source": "an older one"}
            (kept / f"elsewhere-{path.name}").write_text(json.dumps(record))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- measured:begin -->\n<!-- measured:end -->\n<!-- demo:begin -->\n<!-- demo:end -->\n")
    out = ["--out", str(tmp_path / "page.md"), "--readme", str(readme)]
    assert main(["report", "--results", str(kept), *out]) == 0
    assert "its region 'measured' is written anew" in capsys.readouterr().out
    assert "Not run" not in (tmp_path / "page.md").read_text()
    text = readme.read_text()
    assert "as a new session, durable" in text
    assert "\n| the same, cold |" in text
    assert " on another disk | " in text
    assert "The figures are of 2 versions of the code" in text
    assert "\n| restore of a hybrid session: 600 tokens" in text


def test_list_names_all(capsys: Capture) -> None:
    """`list` has a line for each."""
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHES)


@pytest.mark.parametrize("other", ["match", "all"])
def test_unknown_name_is_refused(other: str, tmp_path: Path, capsys: Capture) -> None:
    """An unknown name is named, with those that there are, before anything runs."""
    assert main(["run", other, "nothing", "--results", str(tmp_path)]) == 2
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
    """All processes under one, as far down as there are."""
    mine = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*mine, *(below for child in mine for below in _children(child))]


@pytest.mark.parametrize(
    ("name", "children", "number"),
    [("match", 1, signal.SIGINT), ("match", 1, signal.SIGTERM), ("match", 1, signal.SIGHUP), ("processes", 6, signal.SIGINT)],
)
def test_interrupt_leaves_nothing(name: str, children: int, number: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle: a message, status 130, the scratch directory and all processes gone."""
    command = [sys.executable, "-m", "benches", "run", name, "--quick", "--dir", str(tmp_path), "--results", str(tmp_path / "r")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # where the tests run in the background it may be ignored
    )
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.glob(f"scratch-*/{name}/store*")) or len(_children(process.pid)) < children:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = _children(process.pid)
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=120)
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


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("full", r"all benchmarks at full size; up to (\d+) GB of disk and (\d+) GB of memory"),
        ("quick", r"up to (\d+) GB of disk and of memory"),
    ],
)
def test_readme_says_what_all_needs(size: Size, says: str) -> None:
    """The README's figures for `all` are what its benchmarks ask for, rounded up."""
    needs = [bench.needs(size) for bench in BENCHES.values() if not bench.apart]
    found = re.search(says, (ROOT / "README.md").read_text())
    assert found is not None
    disk, memory = int(found[1]), int(found[found.re.groups])
    assert disk - 1 < max(need.disk for need in needs) / 1e9 <= disk
    assert memory - 1 < max(need.memory for need in needs) / 1e9 <= memory


def test_short_rounds_are_not_a_line_each(tmp_path: Path) -> None:
    """Progress is said of the first round, the last, and in between once a second; every round is noted."""
    said: list[str] = []
    noted: list[int] = []
    context = Context(tmp_path, "smallest", said.append, note=lambda what, seconds: noted.append(len(seconds["a"])))
    seconds = pairs(context, "x", 50, {"a": lambda: 1.0, "b": lambda: None})
    assert said[0].startswith("x: 1 of 50")
    assert said[-1] == "x: 50 of 50"
    assert len(said) < 25
    assert noted == list(range(1, 51))
    assert seconds["a"] == [1.0] * 50


def test_targets_know_their_side() -> None:
    """A limit holds from one side, the limit itself included."""
    assert Target("x", 1.0, 1.0).met
    assert not Target("x", 1.1, 1.0).met
    assert Target("x", 1.1, 1.0, at_most=False).met
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
