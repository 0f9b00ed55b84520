"""Writing the report: each file whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.report import readme
from benches.report.page import MARK, Page
from benches.report.plots import MissingLibrary, draw
from benches.report.runs import choose, read
from benches.workloads import BENCHES

__all__ = ["ReportError", "write_report"]


class ReportError(Exception):
    """The report can't be written; the message says why and what to do."""


def write_report(directory: Path, out: Path, notes: Path | None, readme_path: Path | None, demos: Sequence[Path]) -> Iterator[str]:
    """Write the page `out` and its plots in a directory beside it, named like it; yield a line for each thing to be told.

    Parameters
    ----------
    directory : Path
        Of the results.
    out : Path
        What to write.
    notes : Path or None
        A page that goes in word for word; None looks for `notes-on-NAME` beside `out`, and is content where there is none.
    readme_path : Path or None
        A page with marked regions to write anew, if there is all that goes into them.
    demos : sequence of Path
        Results of the demo, for one of those regions.

    Raises
    ------
    ReportError
        There is no result, `notes` is not there, or `out` was not written by this.
    OSError
        Something can't be written.
    """
    if not directory.is_dir():
        raise ReportError(f"there are no results: {directory} is not a directory; run some benchmarks, or say --results")
    runs, passed = read(directory)
    yield from passed
    for name in sorted({run.name for run in runs} - set(BENCHES)):
        yield f"{name}: passed over, there is no benchmark of this name any more"
    if not any(run.name in BENCHES for run in runs):
        raise ReportError(f"there are no results in {directory}; run some benchmarks (python -m benches run all), or say --results")
    before = _earlier(out)
    shown = {name: choose([run for run in runs if run.name == name]) for name in BENCHES}
    folder = out.with_suffix("")
    page = Page(BENCHES, shown, folder.name)
    text = page.make(_notes(out, notes))
    files: dict[str, bytes] = {}
    try:
        files = {name: draw(plot) for name, plot in page.plots.items()}
    except MissingLibrary:
        yield "matplotlib is not installed: the page has no plots (pip install 'kvstore[bench]')"
        page = Page(BENCHES, shown, folder.name, drawn=False)
        text = page.make(_notes(out, notes))
    for name, data in files.items():
        _replace(folder / name, data)
    _replace(out, text.encode())
    yield f"{out}: {sum(map(bool, shown.values()))} of {len(BENCHES)} benchmarks, {len(files)} plots in {folder}"
    for name in _plots_of(before, folder.name) - set(files):
        (folder / name).unlink(missing_ok=True)
    if readme_path is not None:
        yield from readme.update(readme_path, shown, demos, _replace)


def _earlier(out: Path) -> str:
    """What was written before; refuses to write over anything else."""
    try:
        text = out.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{out} can't be written over: {error}") from error
    if text and MARK not in text:
        raise ReportError(f"{out} was not written by this report: remove it, or choose another file with --out")
    return text


def _notes(out: Path, notes: Path | None) -> str:
    path = notes or out.with_name(f"notes-on-{out.name}")
    try:
        return path.read_text()
    except FileNotFoundError as error:
        if notes is None:
            return ""
        raise ReportError(f"there is no {notes}") from error


def _plots_of(page: str, folder: str) -> set[str]:
    return set(re.findall(rf"\]\({re.escape(folder)}/([a-z0-9_-]+\.png)\)", page))


def _replace(path: Path, data: bytes) -> None:
    """Put a file in another's place in one step; leave one alone that is the same already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
