"""The report: what it makes of the results that there are, and of files that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.__main__ import main
from benches.report.numbers import cell, is_ratio, number, ratio
from benches.results import VERSION
from benches.workloads import BENCHES
from tests.support import ROOT

Capture = pytest.CaptureFixture[str]
MACHINE = {
    "processor": "a processor",
    "cores": 4,
    "memory_bytes": 8 << 30,
    "file_system": "ext4",
    "device": "disk",
    "kernel": "6.1.7-vendor.2",
    "python": "3.12",
    "packages": {"kvstore": "1.0"},
    "source": "aaaa",
}


def result(directory: Path, finished: str, value: float, **changes: Any) -> Path:
    """Write the result of a run of `memory` whose one ratio is `value`."""
    directory.mkdir(exist_ok=True)
    machine = {**MACHINE, **changes.pop("machine", {})}
    record = {
        "version": VERSION,
        "bench": "memory",
        "size": "full",
        "finished": f"{finished}+0000",
        "seconds": 3.0,
        "complete": True,
        "machine": machine,
        "doubts": [],
        "targets": [{"name": "a target", "value": value, "limit": 1.0, "at_most": False, "met": value >= 1.0}],
        "figures": {},
        "tables": [
            {
                "title": "A table",
                "columns": ["what", "ms", "ratio", "ahead"],
                "rows": [["one | side", 1234.5678, value, value > 1], ["other", 3, None, None]],
                "note": "A note.",
            }
        ],
        "plots": [
            {"name": "p", "title": "A plot", "x": "n", "y": "s", "lines": {"kvstore": [[1, 2.0], [10, value]]}, "log_x": True},
            {"name": "q", "title": "Bars", "x": "", "y": "s", "lines": {"a": [[0, value]]}, "bars": True, "groups": ["g"]},
        ],
        **changes,
    }
    path = directory / f"{record['bench']}-{record['size']}-{finished.replace(':', '')}.json"
    path.write_text(json.dumps(record))
    return path


def report(tmp_path: Path, *arguments: str) -> str:
    """Write the report on the results in `tmp_path/r`, and give its text."""
    page = tmp_path / "docs" / "page.md"
    assert main(["report", "--results", str(tmp_path / "r"), "--out", str(page), *arguments]) == 0
    return page.read_text()


def test_page_of_one_run(tmp_path: Path) -> None:
    """It says where, when and what, rounds by size, escapes, names what was not run, and puts the notes in word for word."""
    result(tmp_path / "r", "2030-01-02T03:04:05", 1.234567, doubts=["somebody sneezed"])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes-on-page.md").write_text("## By hand\n\nWord for word.\n")
    text = report(tmp_path)
    assert "| **A** | a processor | 4 | 8.0 GiB | ext4 | disk | 6.1.7 | 3.12 | kvstore 1.0 |" in text
    assert "Machine A, size `full`, 2030-01-02 03:04, 3 s, kvstore 1.0 (aaaa)." in text
    assert "| [memory](#memory) | a target | 1.23 | at least 1 | 1.23 | met, with doubts |" in text
    assert "\n1 targets. All are met; 1 of those that are met, in runs with doubts.\n" in text
    assert "Not all of one version" not in text
    assert "(#how-to-read-these-figures)" not in text
    assert "> **Doubt**: somebody sneezed." in text
    assert BENCHES["memory"].method in text
    assert "| one \\| side | 1,235 | 1.23 | yes |" in text
    assert "| other | 3 | – | – |" in text
    assert "A note." in text
    assert "![A plot](page/memory-p.png)" in text
    assert "| restore | 1.6 GB from the page cache into arrays, validated, against the best plain copy |" in text
    assert "`python -m benches run restore`" in text
    assert text.endswith("## By hand\n\nWord for word.\n")
    assert (tmp_path / "docs" / "page" / "memory-p.png").read_bytes().startswith(b"\x89PNG")


def test_missed_target_and_not_ahead_are_plain(tmp_path: Path) -> None:
    """What was missed, and where something else was faster, stands out."""
    result(tmp_path / "r", "2030-01-02T03:04:05", 0.5)
    text = report(tmp_path)
    assert "| a target | 0.50 | at least 1 | 0.50 | **missed** |" in text
    assert "| 0.50 | **no** |" in text
    assert "**1 is missed**" in text


def test_narrow_miss_can_be_seen(tmp_path: Path) -> None:
    """A figure that would be rounded to its limit has more digits."""
    result(tmp_path / "r", "2030-01-02T03:04:05", 0.9996)
    assert "| a target | 0.9996 | at least 1 | 1.00 | **missed** |" in report(tmp_path)


def test_runs_of_the_same_code_show_their_spread(tmp_path: Path) -> None:
    """The newest is shown, with the least and largest ratio of all; runs of other code are counted and left out."""
    for day, (value, source) in enumerate([(9.0, "old"), (2.0, "aaaa"), (1.5, "aaaa"), (1.75, "aaaa")], 1):
        result(tmp_path / "r", f"2030-01-0{day}T00:00:00", value, machine={"source": source})
    text = report(tmp_path)
    assert "| a target | 1.75 (1.50 to 2.00 in 3 runs) | at least 1 | 1.75 | met |" in text
    assert "| 1.75 (1.50 to 2.00) | yes |" in text
    assert "the newest of 3 runs, the earliest of 2030-01-02 00:00; 1 more of other code is not shown." in text


def test_missed_target_asks_for_a_reason(tmp_path: Path) -> None:
    """Where a benchmark says why it is behind, that stands below its tables; where it doesn't, that is said."""
    result(tmp_path / "r", "2030-01-02T03:04:05", 0.5)
    result(tmp_path / "r", "2030-01-02T03:04:05", 0.5, bench="churn")
    text = report(tmp_path)
    memory, churn = text.partition("\n## memory\n")[2].split("\n## churn\n")
    assert not BENCHES["memory"].behind
    assert "**A target is missed, and no analysis of the reason is written yet.**" in memory
    assert f"**Where kvstore is behind in the tables above, and why.** {BENCHES['churn'].behind.strip()}" in churn
    assert "no analysis" not in churn


def test_figures_of_several_versions_are_told(tmp_path: Path) -> None:
    """Where benchmarks were run with different code, the page says so before any figure, and which is of which."""
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0, bench="churn", machine={"source": "old", "commit": "c0ffee"})
    result(tmp_path / "r", "2030-01-02T00:00:00", 2.0)
    result(tmp_path / "r", "2030-01-03T00:00:00", 2.0, bench="save")
    text = report(tmp_path)
    head, found, rest = text.partition("> **Not all of one version.** The figures on this page are of 2 versions")
    assert found
    assert "1.0 (commit c0ffee, old)" not in head
    assert "> - 1.0 (aaaa), 2030-01-02 00:00 to 2030-01-03 00:00: memory, save\n" in rest
    assert "> - 1.0 (commit c0ffee, old), 2030-01-01 00:00: churn\n" in rest
    assert "kvstore 1.0 (commit c0ffee, old)." in rest


def test_runs_of_one_version_have_no_warning(tmp_path: Path) -> None:
    """The same code in several checkouts is one version; an older run that is not shown is no reason either."""
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0, machine={"source": "old"})
    result(tmp_path / "r", "2030-01-02T00:00:00", 2.0, machine={"commit": "c0ffee"})
    result(tmp_path / "r", "2030-01-03T00:00:00", 2.0, bench="save", machine={"commit": "decade"})
    assert "Not all of one version" not in report(tmp_path)


def test_page_leads_to_how_it_is_read(tmp_path: Path) -> None:
    """Where the notes explain the figures, the page's beginning has a link to it."""
    result(tmp_path / "r", "2030-01-02T03:04:05", 2.0)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes-on-page.md").write_text("## How to read these figures\n\nSo.\n")
    assert "[How to read these figures](#how-to-read-these-figures)" in report(tmp_path)


def test_machines_and_versions_are_kept_apart(tmp_path: Path) -> None:
    """Each has its own section, tables and plots."""
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0, machine={"packages": {"kvstore": "0.9"}})
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    text = report(tmp_path)
    assert "### memory on A" in text
    assert "### memory on B" in text
    assert "| [memory](#memory) on B | a target | 2 |" in text
    assert "memory-p-a.png" in text
    assert (tmp_path / "docs" / "page" / "memory-p-b.png").exists()


def test_largest_size_is_shown(tmp_path: Path) -> None:
    """A later run of a smaller size doesn't hide the full one; alone, it says that it says little."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0, size="quick")
    assert "met, at a size that says little" in report(tmp_path)
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0)
    text = report(tmp_path)
    assert "size `full`" in text
    assert "`quick`" not in text


def test_run_that_broke_off(tmp_path: Path) -> None:
    """Alone it is shown as far as it came; beside a complete one it is a remark."""
    broken: dict[str, Any] = {
        "complete": False,
        "failure": "it fell",
        "measured": {"warm": {"a": [2.0, 3.0, 4.0], "b": [1.0], "c": []}},
        "tables": [],
        "targets": [],
        "plots": [],
    }
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0, **broken)
    text = report(tmp_path)
    assert "> **Broke off: it fell.** What is here was measured until then." in text
    assert "| warm | a | 3 | 3.00 | 3.00 |" in text
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0)
    text = report(tmp_path)
    assert "> A later run, of 2030-01-02 00:00, broke off: it fell." in text
    assert "**Broke off" not in text


def test_machine_with_broken_runs_only_is_shown(tmp_path: Path) -> None:
    """A machine on which it always broke off is not left out for one on which it didn't."""
    result(tmp_path / "r", "2030-01-01T00:00:00", 2.0)
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0, machine={"kernel": "7"}, complete=False, failure="it fell")
    text = report(tmp_path)
    assert "### memory on B" in text
    assert "> **Broke off: it fell.**" in text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"version": 2, "bench"', "JSONDecodeError"),
        ("[]", "it has no version"),
        (json.dumps({"version": 1, "bench": "memory"}), "an older version of the benchmarks"),
        (json.dumps({"version": 99}), "another version of the benchmarks"),
        (json.dumps({"version": VERSION, "size": "full", "bench": "memory"}), "KeyError"),
        ("\udcff", "UnicodeDecodeError"),
    ],
)
def test_broken_file_is_named_and_passed_over(content: str, why: str, tmp_path: Path, capsys: Capture) -> None:
    """A file that is not a result, or one of an older version, costs itself only."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    (tmp_path / "r" / "broken.json").write_text(content, errors="surrogateescape")
    assert "## memory" in report(tmp_path)
    printed = capsys.readouterr().out
    assert "broken.json: passed over" in printed
    assert why in printed


def test_row_of_another_length_is_broken(tmp_path: Path, capsys: Capture) -> None:
    """A table whose row has too few cells is not a result, rather than a table that has slipped."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    tables = [{"title": "T", "columns": ["a", "b"], "rows": [["x"]]}]
    path = result(tmp_path / "r", "2030-01-03T00:00:00", 3.0, tables=tables)
    report(tmp_path)
    assert f"{path}: passed over" in capsys.readouterr().out


def test_unknown_benchmark_is_passed_over(tmp_path: Path, capsys: Capture) -> None:
    """A result of a benchmark that there isn't any more is named."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0, bench="gone")
    report(tmp_path)
    assert "gone: passed over" in capsys.readouterr().out


def test_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """Writing it again changes no file, whatever matplotlib is set to; a plot that is not there any more goes, other files stay."""
    path = result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    report(tmp_path)
    folder = tmp_path / "docs"
    (folder / "page" / "other.png").write_text("somebody's")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: black\nfont.size: 20\n")
    command = [sys.executable, "-m", "benches", "report", "--results", str(tmp_path / "r"), "--out", str(folder / "page2.md")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True)
    assert (folder / "page2" / "memory-p.png").read_bytes() == before[folder / "page" / "memory-p.png"]
    report(tmp_path)
    assert {file: file.read_bytes() for file in before} == before
    path.write_text(path.read_text().replace('"name": "q"', '"name": "z"'))
    report(tmp_path)
    assert not (folder / "page" / "memory-q.png").exists()
    assert (folder / "page" / "memory-z.png").exists()
    assert (folder / "page" / "other.png").exists()


def test_page_of_somebody_else_is_not_written_over(tmp_path: Path, capsys: Capture) -> None:
    """What the report did not write it does not replace."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    assert main(["report", "--results", str(tmp_path / "r"), "--out", str(page)]) == 2
    assert "was not written by this report" in capsys.readouterr().err
    assert page.read_text() == "# Mine\n"


@pytest.mark.parametrize("there", [True, False])
def test_nothing_to_report(there: bool, tmp_path: Path, capsys: Capture) -> None:
    """Without results there is a message and no page."""
    if there:
        (tmp_path / "r").mkdir()
    assert main(["report", "--results", str(tmp_path / "r"), "--out", str(tmp_path / "page.md")]) == 2
    assert "there are no results" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_missing_notes_are_named(tmp_path: Path, capsys: Capture) -> None:
    """Notes that were asked for and aren't there are an error, before anything is written."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    arguments = ["--results", str(tmp_path / "r"), "--out", str(tmp_path / "page.md"), "--notes", str(tmp_path / "no.md")]
    assert main(["report", *arguments]) == 2
    assert "no.md" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_without_matplotlib_there_are_no_plots(tmp_path: Path) -> None:
    """The page is written all the same, refers to no plot, and it is said why."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    (tmp_path / "modules" / "matplotlib").mkdir(parents=True)
    (tmp_path / "modules" / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), str(ROOT)])}
    command = [sys.executable, "-m", "benches", "report", "--results", str(tmp_path / "r"), "--out", str(tmp_path / "page.md")]
    done = subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True, text=True)
    assert "kvstore[bench]" in done.stdout
    assert ".png" not in (tmp_path / "page.md").read_text()


def test_readme_without_sources_stays_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    """A region is written from all of its sources or not at all."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    readme = tmp_path / "README.md"
    text = "a\n<!-- measured:begin -->\nold\n<!-- measured:end -->\nb\n<!-- demo:begin -->\nold\n<!-- demo:end -->\n"
    readme.write_text(text)
    report(tmp_path, "--readme", str(readme))
    printed = capsys.readouterr().out
    assert "'measured' stays as it is: no full run of match, restore" in printed
    assert "'demo' stays as it is: no result of `make demo`" in printed
    assert readme.read_text() == text


def test_readme_of_this_project_has_its_regions() -> None:
    """Both are there, once."""
    text = (ROOT / "README.md").read_text()
    for name in ("measured", "demo"):
        assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00391, "0.00391"),
        (0.953, "0.953"),
        (21.84, "21.8"),
        (999.7, "1,000"),
        (123456.0, "123,456"),
        (12345678, "12,345,678"),
        (0.0, "0"),
        (float("nan"), "none"),
        (-3.14159, "-3.14"),
    ],
)
def test_numbers_are_rounded_by_their_size(value: float, shown: str) -> None:
    """Three digits that say something; whole numbers are whole."""
    assert number(value) == shown


@pytest.mark.parametrize(
    ("head", "is_one"),
    [
        ("ratio to plain writes", True),
        ("of plain writes", True),
        ("p99, of one alone", True),
        ("times kvstore's", True),
        ("times, ms", False),
        ("GB/s", False),
        ("samples of it", False),
    ],
)
def test_columns_of_ratios_are_known(head: str, is_one: bool) -> None:
    """A column is one of ratios by its head."""
    assert is_ratio(head) == is_one


def test_ratios_and_truths() -> None:
    """A ratio has two places, whole numbers none."""
    assert [ratio(x) for x in (1.005, 12.345, 104.6, 0.0123)] == ["1.00", "12.3", "105", "0.0123"]
    assert cell(1.23456, "ratio to plain") == "1.23"
    assert cell(1.23456, "ms") == "1.23"
    assert cell(0.123456, "ms") == "0.123"
    assert cell(7, "tokens") == "7"


def demo(path: Path, *, ok: bool = True, length: int = 3000) -> Path:
    """Write a result of the demo."""
    turn = {"prompt": "lighthouse", "tokens": 3036, "reused": 3000, "read": 36, "ttft_cold": 14.06, "ttft_promoted": 0.65}
    equal = {"ratio": 21.6, "answer_equal": True, "state_equal": True, "logits_equal": True}
    rows = [
        {**turn, **equal, "turn": 1, "ttft_promoted": None},
        {**turn, **equal, "turn": 2},
        {**turn, **equal, "turn": 3, "read": 41},
    ]
    figures = {"restore_seconds_mean": 0.0181, "stored_bytes": 200e6, "separate_bytes": 217e6, "rewritten_every_turn_bytes": 849e6}
    record = {
        "ok": ok,
        "machine": {"model": "a model", "cores": 4, "cpu": "a processor"},
        "length": length,
        "token_bytes": 23040,
        "rows": rows,
        "figures": figures,
        "control": {"reused": 1664},
    }
    path.write_text(json.dumps(record))
    return path


def test_demo_in_the_readme(tmp_path: Path, capsys: Capture) -> None:
    """Its turns are a table, a longer demo is a sentence; one that failed changes nothing."""
    result(tmp_path / "r", "2030-01-02T00:00:00", 3.0)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nafter\n")
    demos = [str(demo(tmp_path / "demo.json")), str(demo(tmp_path / "long.json", length=7600))]
    report(tmp_path, "--readme", str(readme), "--demo", *demos)
    text = readme.read_text()
    assert text.startswith(
        "before\n<!-- demo:begin -->\n`make demo` on 4 cores of a processor: a model (23,040 bytes of KV a token)"
    )
    assert "| lighthouse | 2 | 3,036 | 3,000 | 36 | 14.06 | 0.65 | 22x | yes |" in text
    assert "| lighthouse | 1 |" not in text
    assert "reading the 36 to 41 new tokens" in text
    assert "takes 18 ms" in text
    assert "With prompts of 7,600 tokens (`--length 7600`): 0.7 s against 14 s, 22x, all equal." in text
    assert "went back to 1,664 tokens" in text
    assert text.endswith("<!-- demo:end -->\nafter\n")
    report(tmp_path, "--readme", str(readme), "--demo", str(demo(tmp_path / "demo.json", ok=False)))
    assert "was not carried out as it must be" in capsys.readouterr().out
    report(tmp_path, "--readme", str(readme), "--demo", str(demo(tmp_path / "demo.json", length=1000)))
    assert "run it without --quick" in capsys.readouterr().out
    assert readme.read_text() == text
