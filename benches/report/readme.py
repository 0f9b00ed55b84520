"""The regions of the README that show figures: written anew, each from all of its sources or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benches.harness import median
from benches.report.numbers import number, ratio, spread
from benches.report.runs import Machine, Shown

__all__ = ["update"]

_Figures = dict[str, Any]
Showns = Mapping[str, Sequence[Shown]]


_DEMO_TOKENS = 3000  # what a prompt of the demo has, unless it is a quick one


class _Missing(Exception):
    """What a region needs is not there."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The full results of one machine: the newest of each benchmark, and how far its ratios go over its runs."""

    machine: Machine
    shown: dict[str, Shown]

    @classmethod
    def of(cls, all_shown: Showns) -> _Source:
        """That of the machine with most of them."""
        by_machine: dict[Machine, dict[str, Shown]] = {}
        for name, several in all_shown.items():
            for shown in several:
                if shown.run.size == "full" and shown.run.failure is None:
                    by_machine.setdefault(shown.run.machine, {})[name] = shown
        if not by_machine:
            raise _Missing("no benchmark was run at full size")
        machine = max(by_machine, key=lambda m: len(by_machine[m]))
        return cls(machine, by_machine[machine])

    def has(self, names: Sequence[str]) -> None:
        """Raise unless there are results of all these."""
        missing = [name for name in names if name not in self.shown]
        if missing:
            raise _Missing(f"no full run of {', '.join(missing)} on the machine of the others ({self.machine.processor})")

    def figures(self, name: str) -> _Figures:
        """The figures of the newest run."""
        return self.shown[name].run.outcome.figures

    def over(self, name: str, value: Callable[[_Figures], float]) -> str:
        """A ratio of the newest run, with how far it went over all."""
        values = [value(run.outcome.figures) for run in self.shown[name].same]
        return ratio(values[-1]) + (f" ({spread(values)})" if len(values) > 1 and spread(values) != ratio(values[-1]) else "")


Row = tuple[str, str, str]


def _match(s: _Source) -> Iterator[Row]:
    long = s.figures("match")["long"]
    ours = ", kvstore"
    by_count = sorted((key for key in long["ms"] if key.endswith(ours)), key=lambda key: int(key.removesuffix(ours)))
    for place, key in enumerate(dict.fromkeys((by_count[0], by_count[-1]))):
        times, count = long["ms"][key], key.removesuffix(ours)
        what = f"match of a {long['prompt_tokens']:,}-token prompt, {int(count):,} stored sessions"
        against = s.over("match", lambda f: f["long"]["ms"][by_count[-1]]["p50"] / f["long"]["ms"][by_count[0]]["p50"])
        yield (
            what if place == 0 else f"the same with {int(count):,} stored sessions",
            f"{number(times['p50'])} ms (p99 {number(times['p99'])} ms)",
            "" if place == 0 else f"{against} times the above",
        )


def _restore(s: _Source) -> Iterator[Row]:
    f = s.figures("restore")
    yield (
        f"restore of 100,000 tokens at 16 KiB ({f['bytes'] / 1e9:.1f} GB) from the page cache into arrays, every byte checked",
        f"{number(f['warm']['gb_s']['kvstore'])} GB/s",
        f"{s.over('restore', lambda f: f['warm']['ratio'])} times the better of two plain copies (memcpy from a map, pread)",
    )


def _cold_row(s: _Source, what: str) -> Row:
    raw, mapped = s.over("cold", lambda f: f["ratio_to_raw"]), s.over("cold", lambda f: f["ratio_to_map"])
    return (
        what,
        f"{number(s.figures('cold')['gb_s']['kvstore'])} GB/s",
        f"{raw} times the best raw direct reads, {mapped} times a cold map",
    )


def _layers(s: _Source) -> Row:
    f = s.figures("layers")
    first = sorted(f["seconds"]["first_stream"]["warm"])
    share = s.over("layers", lambda f: 1 / f["shares"]["warm"]["stream"])
    return (
        f"the first of {f['layers']} layers' {2 * f['layers']} streams, during a warm restore of {f['bytes'] / 1e9:.1f} GB",
        f"{number(first[len(first) // 2] * 1e3)} ms",
        f"the whole takes {share} times as long",
    )


def _lease(s: _Source) -> Row:
    f = s.figures("lease")
    return (
        f"a lease on 100,000 tokens with a view of each of their {f['blocks']} blocks",
        f"{number(f['warm']['median_ms'])} ms",
        f"copying the bytes takes {s.over('lease', lambda f: f['warm']['ratio'])} times as long",
    )


def _save(s: _Source) -> Row:
    return (
        "save of 100,000 tokens at 16 KiB as a new session, durable",
        f"{number(s.figures('save')['gb_s']['kvstore'])} GB/s",
        f"{s.over('save', lambda f: f['ratio']['kvstore'])} times plain writes with fdatasync every 8 MiB",
    )


def _turn(s: _Source) -> Row:
    turns = s.figures("turn")["turns"]
    worst = max(turns, key=lambda turn: turn["ratio"])
    return (
        f"a turn of +{worst['tokens']} tokens on it, the worst of {len(turns)}: written to the file system",
        f"{number(worst['written_bytes'] / 2**20)} MiB",
        f"{s.over('turn', lambda f: max(turn['ratio'] for turn in f['turns']))} times the new rows and the rewritten tail",
    )


def _memory(s: _Source) -> Row:
    parts = [s.figures("save")["above_mib"], s.figures("restore")["peak_mib"], s.figures("cold")["peak_mib"]]
    saving, warm, cold = (f"{part:.0f}" for part in parts)
    return ("the process's own memory above the arrays, saving, restoring warm and cold", f"{saving}, {warm} and {cold} MiB", "")


def _hybrid(s: _Source) -> Iterator[Row]:
    if "hybrid" not in s.shown:
        return
    longest = max(s.figures("hybrid")["restores"], key=lambda one: one["bytes"])
    beside = longest["beside_ms"]["p50"]
    yield (
        f"restore of a hybrid session: {longest['tokens']:,} tokens and {longest['states_bytes'] / 1e6:.0f} MB of recurrent states",
        f"{number(1e3 * median(longest['seconds']['kvstore']))} ms",
        f"{number(abs(beside))} ms {'more' if beside > 0 else 'less'} than a plain copy of its bytes",
    )


def _sharing(s: _Source) -> Row:
    f = s.figures("sharing")
    tokens = f["shared_tokens"] + f["sessions"] * f["own_tokens"]
    return (
        f"{f['sessions']} sessions of {f['shared_tokens']:,} shared and {f['own_tokens']:,} own tokens, real model: on disk",
        f"{f['disk_bytes'] / 1e6:.0f} MB",
        f"{s.over('sharing', lambda f: f['disk_bytes'] / f['distinct_bytes'])} times their {tokens:,} distinct tokens",
    )


def _measured(all_shown: Showns) -> str:
    s = _Source.of(all_shown)
    names = ("match", "restore", "cold", "layers", "lease", "save", "turn", "sharing")
    s.has(names)
    elsewhere = [
        _Source(shown.run.machine, {"cold": shown})
        for shown in all_shown["cold"]
        if shown.run.size == "full" and shown.run.failure is None and _other_disk(shown.run.machine, s.machine)
    ]
    rows = [
        *_match(s),
        *_restore(s),
        _cold_row(s, "the same, cold"),
        *(_cold_row(other, f"the same, cold, on {other.machine.file_system} on {other.machine.device}") for other in elsewhere),
        *_hybrid(s),
        _layers(s),
        _lease(s),
        _save(s),
        _turn(s),
        _memory(s),
        _sharing(s),
    ]
    m = s.machine
    shown = [name for name in (*names, "hybrid") if name in s.shown]
    doubtful = [name for name in shown if s.shown[name].run.outcome.doubts]
    doubts = f" Runs with doubts, which the page names: {', '.join(doubtful)}." if doubtful else ""
    used = [s.shown[name].run for name in shown] + [other.shown["cold"].run for other in elsewhere]
    versions = dict.fromkeys(run.source or run.version for run in sorted(used, key=lambda run: run.finished, reverse=True))
    of = f" The figures are of {len(versions)} versions of the code: the page says which of which." if len(versions) > 1 else ""
    text = (
        f"On {m.cores} cores of {m.processor} ({m.memory_gib:.0f} GiB of memory, {m.file_system} on {m.device}, Linux {m.kernel}, "
        f"Python {m.python}).\n"
        "Ratios are taken within one run, against alternating baselines, and are medians of its rounds; where there are several\n"
        "runs, the newest is shown, with the least and the largest ratio in brackets. `make bench` measures them on yours;\n"
        f"[docs/benchmarks.md](docs/benchmarks.md) has more.{doubts}{of}"
    )
    return text + "\n\n" + _table(("what", "measured", "against"), ("---", "---", "---"), rows)


def _other_disk(one: Machine, other: Machine) -> bool:
    """Whether two machines are one with two disks."""
    return (one.device, one.file_system) != (other.device, other.file_system) and (
        replace(one, device=other.device, file_system=other.file_system) == other
    )


def _table(heads: Sequence[str], sides: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (heads, sides, *rows))


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _demo(paths: Sequence[Path]) -> str:
    """The first one as a table, and a sentence for each of the others."""
    if not paths:
        raise _Missing("no result of `make demo` was named (--demo)")
    records = []
    for path in paths:
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise _Missing(f"{path} can't be read: {error}") from error
        if not record.get("ok"):
            raise _Missing(f"the demo of {path} was not carried out as it must be")
        if record["length"] < _DEMO_TOKENS:
            raise _Missing(f"the demo of {path} had prompts of {record['length']:,} tokens only; run it without --quick")
        records.append(record)
    first = records[0]
    f, control = first["figures"], first["control"]
    turns = _promoted(first)
    equal = ("answer_equal", "state_equal", "logits_equal")
    rows = [
        (
            row["prompt"],
            str(row["turn"]),
            *(f"{row[key]:,}" for key in ("tokens", "reused", "read")),
            f"{row['ttft_cold']:.2f}",
            f"{row['ttft_promoted']:.2f}",
            f"{row['ratio']:.0f}x",
            "yes" if all(row[key] for key in equal) else "**no**",
        )
        for row in turns
    ]
    heads = (
        "prompt",
        "turn",
        "tokens",
        "reused",
        "read",
        "cold",
        "promoted",
        "ratio",
        "answer, whole state and first logits equal",
    )
    longer = "".join(
        f" With prompts of {record['length']:,} tokens (`--length {record['length']}`): "
        f"{_range([row['ttft_promoted'] for row in _promoted(record)], '.1f')} s against "
        f"{_range([row['ttft_cold'] for row in _promoted(record)], '.0f')} s, "
        f"{_range([row['ratio'] for row in _promoted(record)], '.0f')}x, all equal."
        for record in records[1:]
    )
    on = first["machine"]
    return (
        f"`make demo` on {on['cores']} cores of {on['cpu']}: {on['model']} ({first['token_bytes']:,.0f} bytes of KV a token), "
        "three sessions that begin alike, each server process a new one.\nSeconds to the first token:\n\n"
        + _table(heads, ("---",) * len(heads), rows)
        + f"\n\nNearly all of the promoted time is the model reading the {_range([row['read'] for row in turns], 'd')} new tokens: "
        f"the restore itself takes {1e3 * f['restore_seconds_mean']:.0f} ms.\n"
        f"Equal means bit for bit, against a live engine that was never restarted.{longer}\n"
        f"Stored were {f['stored_bytes'] / 1e6:.0f} MB where separate snapshots take {f['separate_bytes'] / 1e6:.0f} MB and "
        f"rewriting each session at each turn writes {f['rewritten_every_turn_bytes'] / 1e6:.0f} MB.\n"
        "With one byte of a stored block flipped, the promote refused it, went back to "
        f"{control['reused']:,} tokens, and the answer was the same."
    )


def _promoted(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["ttft_promoted"]]


def _put(text: str, name: str, made: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise _Missing(f"it has no region from {begin} to {end}")
    return f"{head}{begin}\n{made}\n{end}{tail}"


def update(path: Path, shown: Showns, demos: Sequence[Path], replace: Callable[[Path, bytes], None]) -> Iterator[str]:
    """Write the regions anew; one that lacks a source stays as it is. Yield a line for each."""
    text = path.read_text()
    makers: dict[str, Callable[[], str]] = {"measured": lambda: _measured(shown), "demo": lambda: _demo(demos)}
    for name, make in makers.items():
        try:
            text = _put(text, name, make())
            yield f"{path}: its region {name!r} is written anew"
        except _Missing as error:
            yield f"{path}: its region {name!r} stays as it is: {error}"
        except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
            yield f"{path}: its region {name!r} stays as it is: a result lacks what it needs: {type(error).__name__}: {error}"
    replace(path, text.encode())
