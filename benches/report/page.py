"""The page: a summary of all targets, then benchmark after benchmark with its method, tables, plots and doubts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benches.harness import Bench, Plot, Table, Target, median
from benches.report.numbers import cell, is_ratio, number, ratio, spread
from benches.report.runs import Machine, Run, Shown

__all__ = ["MARK", "Page", "mixed"]

MARK = "<!-- Written by `python -m benches report`: what is changed here by hand is lost. -->"
_INTRO = """\
kvstore keeps the attention state ("KV cache") of LLM sessions on a local disk and hands it back. This page has what that costs,
each figure beside what limits it on the same machine: a plain copy of the same bytes, raw reads of the disk, plain writes that are
made durable; or beside what people would use instead.

Words in the tables: a *session* is the state of one prompt, so many tokens of so many bytes each. *Warm* is from the page cache,
*cold* from the disk with nothing of it in the page cache. A *lease* finds the longest stored prefix of a prompt and pins it. A
server's *cascade* saves what a turn has added, and its *promote* restores the longest prefix into the engine. *Durable* is what
survives a power loss.

The page is written by `python -m benches report` from the files that `python -m benches run` leaves: no figure in it is written by
hand. A ratio is taken within one run, against sides that take turns in it, and is the median of its rounds, unless a table says
otherwise. Where there are several runs of the same code on the same machine, the newest is shown, with the least and the largest
ratio of all of them in brackets."""
_NOTES_HEAD = "How to read these figures"


@dataclass(slots=True)
class Page:
    """Makes the page.

    Attributes
    ----------
    benches : mapping of str to Bench
        All that there are, in their order.
    shown : mapping of str to list of Shown
        What there is of each, by name.
    plots : dict of str to Plot
        Files of plots that the page refers to, by their names in `folder`: filled while it is made.
    folder : str
        Where the page finds its plots.
    drawn : bool
        Whether there will be plots.
    """

    benches: Mapping[str, Bench]
    shown: Mapping[str, Sequence[Shown]]
    folder: str
    drawn: bool = True
    plots: dict[str, Plot] = field(default_factory=dict)
    _labels: dict[Machine, str] = field(default_factory=dict)

    def make(self, notes: str) -> str:
        """Make the page's text, with `notes` word for word at its end."""
        there = [shown for name in self.benches for shown in self.shown.get(name, ())]
        newest = sorted(there, key=lambda shown: shown.run.finished, reverse=True)
        for place, machine in enumerate(dict.fromkeys(shown.run.machine for shown in newest)):
            self._labels[machine] = _label(place)
        parts = ["# Benchmarks", MARK, _INTRO]
        if f"## {_NOTES_HEAD}\n" in notes:
            parts.append(f"[{_NOTES_HEAD}](#{_anchor(_NOTES_HEAD)}) has more, and says what a doubt is.")
        parts += list(mixed(there))
        if there:
            parts += list(self._summary())
        else:
            parts.append("Nothing has been run yet.")
        for name, bench in self.benches.items():
            if self.shown.get(name):
                parts += list(self._section(bench, self.shown[name]))
        parts += list(self._not_run())
        if notes.strip():
            parts.append(notes.strip())
        return "\n\n".join(parts) + "\n"

    def _on(self, shown: Shown) -> str:
        return f" on {self._labels[shown.run.machine]}" if len(self._labels) > 1 else ""

    def _summary(self) -> Iterator[str]:
        yield "## Targets"
        all_shown = [(name, shown) for name in self.benches for shown in self.shown.get(name, ())]
        rows = [
            (f"[{name}](#{_anchor(name)}){self._on(shown)}", *_target_row(target, shown))
            for name, shown in all_shown
            for target in shown.run.outcome.targets
        ]
        if rows:
            yield _count([(target, shown.run) for _, shown in all_shown for target in shown.run.outcome.targets])
            yield _table(("benchmark", *_TARGET_HEADS), rows)
        else:
            yield "No benchmark that was run has one."
        yield "## Machines"
        heads = ("", "processor", "cores", "memory", "file system", "device", "kernel", "Python", "packages")
        yield _table(
            heads,
            [
                (
                    f"**{label}**",
                    machine.processor,
                    str(machine.cores),
                    f"{machine.memory_gib:.1f} GiB",
                    machine.file_system,
                    machine.device,
                    machine.kernel,
                    machine.python,
                    ", ".join(f"{package} {version}" for package, version in machine.packages),
                )
                for machine, label in self._labels.items()
            ],
        )

    def _section(self, bench: Bench, all_shown: Sequence[Shown]) -> Iterator[str]:
        yield f"## {bench.name}"
        yield f"{bench.title[:1].upper()}{bench.title[1:]}."
        if bench.method:
            yield bench.method.strip()
        for shown in all_shown:
            run = shown.run
            if len(all_shown) > 1:
                yield f"### {bench.name} on {self._labels[run.machine]}"
            yield self._run_line(shown)
            warnings = list(_warnings(shown))
            if warnings:
                yield "\n".join(f"> {line}" + ("  " if line is not warnings[-1] else "") for line in warnings)
            if run.outcome.targets:
                yield _table(_TARGET_HEADS, [_target_row(t, shown) for t in run.outcome.targets])
            for table in run.outcome.tables:
                yield from _result(table, shown)
            if run.size == "full" and any(not t.met for t in run.outcome.targets) and not bench.behind:
                yield "**A target is missed, and no analysis of the reason is written yet.**"
            if run.failure is not None:
                yield from _measured_so_far(run)
            for plot in run.outcome.plots:
                label = self._labels[run.machine].lower()
                name = f"{bench.name}-{plot.name}" + ("" if len(all_shown) == 1 else f"-{label}") + ".png"
                self.plots[name] = plot
                if self.drawn:
                    yield f"![{plot.title}]({self.folder}/{name})"
        if bench.behind:
            yield f"**Where kvstore is behind in the tables above, and why.** {bench.behind.strip()}"

    def _run_line(self, shown: Shown) -> str:
        run = shown.run
        took = f"{run.seconds / 60:.0f} minutes" if run.seconds >= 120 else f"{run.seconds:.0f} s"
        line = f"Machine {self._labels[run.machine]}, size `{run.size}`, {run.when}, {took}, kvstore {run.version}"
        if shown.others:
            line += f"; the newest of {len(shown.same)} runs, the earliest of {shown.others[0].when}"
        if shown.older:
            line += f"; {number(shown.older)} more of other code {'is' if shown.older == 1 else 'are'} not shown"
        return line + "."

    def _not_run(self) -> Iterator[str]:
        missing = [bench for name, bench in self.benches.items() if not self.shown.get(name)]
        if missing:
            yield "## Not run"
            yield _table(
                ("benchmark", "what it measures", "command"),
                [(bench.name, bench.title, f"`python -m benches run {bench.name}`") for bench in missing],
            )


def _label(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"M{place}"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    sides = ["---:" if place < len(numbers) and numbers[place] else "---" for place in range(len(heads))]
    lines = [heads, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def mixed(there: Sequence[Shown]) -> Iterator[str]:
    """A warning where figures side by side are of different code, with what is of which; the newest first."""
    groups: dict[str, list[Shown]] = {}
    for shown in sorted(there, key=lambda shown: shown.run.finished, reverse=True):
        groups.setdefault(shown.run.source or shown.run.version, []).append(shown)
    if len(groups) < 2:
        return
    lines = [
        f"**Not all of one version.** The figures on this page are of {len(groups)} versions of kvstore's code. Those of one "
        "version can't be compared with those of another: between them the code has changed, and the hour."
    ]
    for several in groups.values():
        whens = sorted(shown.run.when for shown in several)
        when = whens[0] if whens[0] == whens[-1] else f"{whens[0]} to {whens[-1]}"
        names = ", ".join(dict.fromkeys(shown.run.name for shown in reversed(several)))
        lines.append(f"- {several[0].run.version}, {when}: {names}")
    yield "\n".join(f"> {line}" for line in (lines[0], "", *lines[1:])).replace("> \n", ">\n")


_TARGET_HEADS = ("target", "measured", "limit", "ratio to the limit", "")


def _target_row(target: Target, shown: Shown) -> tuple[str, ...]:
    share = ratio(target.value / target.limit) if target.limit else "–"
    return (target.name, _measured(target, shown), _limit(target), share, _verdict(target, shown.run))


def _count(targets: Sequence[tuple[Target, Run]]) -> str:
    """How many targets there are, and what became of them."""
    missed = sum(not target.met for target, _ in targets)
    doubtful = sum(bool(run.outcome.doubts) for target, run in targets if target.met)
    what = "All are met" if not missed else f"**{missed} {'is' if missed == 1 else 'are'} missed**"
    doubts = f"; {doubtful} of those that are met, in runs with doubts" if doubtful else ""
    return f"{len(targets)} targets. {what}{doubts}."


def _measured(target: Target, shown: Shown) -> str:
    values = [t.value for run in shown.same for t in run.outcome.targets if t.name == target.name]
    text = _value(target.value)
    if not target.met and text in (_value(target.limit), ratio(target.limit)):
        text = f"{target.value:.6g}"  # or nobody would see why it was missed
    return f"{text} ({spread(values)} in {len(values)} runs)" if len(values) > 1 else text


def _limit(target: Target) -> str:
    return f"{'at most' if target.at_most else 'at least'} {_value(target.limit)}"


def _value(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and value == round(value) else ratio(value)


def _verdict(target: Target, run: Run) -> str:
    text = "met" if target.met else "**missed**"
    if run.size != "full":
        text += ", at a size that says little"
    if run.failure is not None:
        text += ", of a run that broke off"
    return text + (", with doubts" if run.outcome.doubts else "")


def _warnings(shown: Shown) -> Iterator[str]:
    run = shown.run
    if run.failure is not None:
        yield f"**Broke off: {run.failure}.** What is here was measured until then."
    if run.size != "full":
        yield "**Not the full size**: these figures show that it works, and say little about speed."
    for doubt in run.outcome.doubts:
        yield f"**Doubt**: {doubt}."
    if shown.broken is not None:
        yield f"A later run, of {shown.broken.when}, broke off: {shown.broken.failure}."


def _key(row: Sequence[object]) -> tuple[object, ...]:
    """What a row is about: its words, without its figures."""
    return tuple(value if isinstance(value, str) else None for value in row)


def _result(table: Table, shown: Shown) -> Iterator[str]:
    """A table of a result, its ratios with how far they went apart over the runs."""
    if table.title:
        yield f"**{table.title}**"
    seen: dict[tuple[object, ...], list[list[float]]] = {}
    for run in shown.same:
        for other in run.outcome.tables:
            if (other.title, other.columns) != (table.title, table.columns):
                continue
            for key in {_key(row) for row in other.rows}:
                alike = [row for row in other.rows if _key(row) == key]
                if len(alike) == 1:
                    places = seen.setdefault(key, [[] for _ in table.columns])
                    for place, value in enumerate(alike[0]):
                        if isinstance(value, int | float) and not isinstance(value, bool):
                            places[place].append(float(value))
    rows = []
    for row in table.rows:
        texts = [cell(value, head) for value, head in zip(row, table.columns, strict=True)]
        for place, head in enumerate(table.columns):
            values = seen.get(_key(row), [[] for _ in table.columns])[place]
            if is_ratio(head) and len(values) > 1 and min(values) != max(values):
                texts[place] += f" ({spread(values)})"
        rows.append(texts)
    numbers = [
        any(isinstance(row[place], int | float) for row in table.rows)
        and not any(isinstance(row[place], str) for row in table.rows)
        for place in range(len(table.columns))
    ]
    yield _table(table.columns, rows, numbers)
    if table.note:
        yield table.note


def _measured_so_far(run: Run) -> Iterator[str]:
    """What the comparisons of a run that broke off had come to."""
    rows = []
    for what, sides in run.measured.items():
        medians = {side: median(taken) for side, taken in sides.items() if taken}
        fastest = min(medians.values(), default=0.0)
        rows += [
            (what, side, number(len(sides[side])), number(float(taken)), ratio(taken / fastest) if fastest else "–")
            for side, taken in medians.items()
        ]
    if rows:
        yield "**Until it broke off**"
        yield _table(("comparison", "side", "rounds", "median, s", "ratio to the fastest"), rows, (False, False, True, True, True))
