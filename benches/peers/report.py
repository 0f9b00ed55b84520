"""What the comparison shows: tables, a plot, targets, lines for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benches.harness import Cell, Outcome, Plot, Table, Target, median
from benches.peers.behind import MEASURES, behind, ratio
from benches.peers.measure import Compared, Plan, Side
from benches.peers.registry import KVSTORE, KVSTORE_LLAMA

__all__ = ["report"]

_TIMES = "times kvstore's time"
_AHEAD = "kvstore ahead"
_STAYED = 0.02
_OWN = {
    "cold": "cold_own",
    "warm": "warm_own",
    "first": "first_own",
    "shared": "shared_own",
}


def _seconds(side: Side, name: str) -> list[float]:
    found: list[float] = getattr(side, name)
    return found


def _ahead(value: float | None) -> Cell:
    return None if value is None else "yes" if value >= 1 else "no"


def _all_ours(done: Sequence[Compared], name: str) -> list[float]:
    return [value for one in done for value in _seconds(one.ours, name)]


def _measured(done: Sequence[Compared]) -> list[Compared]:
    return [one for one in done if one.installed]


def _restore_table(done: Sequence[Compared], plan: Plan, name: str, title: str, note: str) -> Table:
    def speed(seconds: Sequence[float], tokens: int) -> float | None:
        return tokens * plan.shape.token_bytes / median(seconds) / 1e9 if seconds else None

    def had(side: Side) -> int:
        return side.shared_tokens if name == "shared" else plan.tokens

    ours = _all_ours(done, name)
    if not ours:
        return Table(title, ("store", _TIMES), ())
    shared = (had(next(one.ours for one in done if one.ours.shared)),) if name == "shared" else ()
    mine = speed(ours, shared[0] if shared else plan.tokens)
    rows: list[tuple[Cell, ...]] = [("kvstore", KVSTORE.checks, *shared, mine, mine, 1.0, 1.0, "")]
    for one in _measured(done):
        arrays, own = ratio(one, name), ratio(one, name, _OWN[name])
        rows.append(
            (
                one.peer.name,
                one.peer.checks or "nothing",
                *((had(one.theirs),) if name == "shared" else ()),
                speed(_seconds(one.theirs, _OWN[name]), had(one.theirs)),
                speed(_seconds(one.theirs, name), had(one.theirs)),
                own,
                arrays,
                _ahead(arrays),
            )
        )
    columns = (
        "store",
        "checks",
        *(("tokens had",) if name == "shared" else ()),
        "as it delivers, GB/s",
        "into the engine's arrays, GB/s",
        f"as it delivers, {_TIMES}",
        f"into the engine's arrays, {_TIMES}",
        _AHEAD,
    )
    return Table(title, columns, tuple(rows), note)


def _save_table(done: Sequence[Compared], plan: Plan, turn: bool) -> Table:
    plain, durable = ("turn", "turn_durable") if turn else ("save", "save_durable")
    rows: list[tuple[Cell, ...]] = []
    new = plan.turn * plan.shape.token_bytes

    def bytes_of(side: Side) -> tuple[Cell, ...]:
        return (median(side.turn_bytes) / new if side.turn_bytes else None,) if turn else ()

    ours = _all_ours(done, durable)
    if ours:
        first = next(one.ours for one in done if _seconds(one.ours, durable))
        rows.append(("kvstore", *bytes_of(first), median(ours) * 1e3, median(ours) * 1e3, 1.0, 1.0, ""))
    for one in _measured(done):
        theirs = _seconds(one.theirs, plain)
        if not theirs:
            continue
        value = ratio(one, durable)
        synced = _seconds(one.theirs, durable)
        rows.append(
            (
                one.peer.name,
                *bytes_of(one.theirs),
                median(theirs) * 1e3,
                median(synced) * 1e3,
                ratio(one, plain),
                value,
                _ahead(value),
            )
        )
    columns = (
        "store",
        *(("written, times the new bytes",) if turn else ()),
        "until the call returns, ms",
        "until it is durable, ms",
        f"until the call returns, {_TIMES}",
        f"until it is durable, {_TIMES}",
        _AHEAD,
    )
    what = f"The tenth turn's save, and those after it (+{plan.turn} tokens each)" if turn else "Saving a first session"
    note = (
        "kvstore's save is durable when it returns. Peers that don't sync are timed until the call returns, and with a sync of all "
        "their files after it. "
    )
    if turn:
        note += "Written is what was handed to write calls or what the kernel counted as written to storage, whichever is more."
    return Table(what, columns, tuple(rows), note)


def _disk_table(done: Sequence[Compared], plan: Plan) -> Table:
    distinct = (plan.shared + 3 * (plan.tokens - plan.shared)) * plan.shape.token_bytes
    rows: list[tuple[Cell, ...]] = []
    ours = next((one.ours.disk for one in done if one.ours.disk), 0)
    if ours:
        rows.append(("kvstore", ours / 1e6, ours / distinct, 1.0, ""))
    rows += [
        (one.peer.name, one.theirs.disk / 1e6, one.theirs.disk / distinct, value, _ahead(value))
        for one in _measured(done)
        if one.theirs.disk and one.ours.disk
        for value in [one.theirs.disk / one.ours.disk]
    ]
    return Table(
        "Bytes on disk of three sessions that share 9 of 10 tokens",
        ("store", "MB", "times the distinct bytes", "times kvstore's", _AHEAD),
        tuple(rows),
        "Blocks that the file system has allocated. What has only whole chunks leaves out the rest of each session.",
    )


def _safety_table(done: Sequence[Compared]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    ours = next((one.ours for one in done if one.ours.flipped), None)
    if ours is not None:
        rows.append(("kvstore", ours.found, ours.flipped, "yes" if ours.noticed else "no", 1.0))
    rows += [
        (one.peer.name, one.theirs.found, one.theirs.flipped, "yes" if one.theirs.noticed else "no", float(one.theirs.noticed))
        for one in _measured(done)
        if one.theirs.flipped
    ]
    return Table(
        "A new process, and one flipped byte",
        ("store", "found by a new process", "after one byte was flipped", "noticed", "noticed, of 1"),
        tuple(rows),
        "The byte is in the middle of the first session's rows, found in the files by what it is. Then a new process restores.",
    )


def _setting_table(done: Sequence[Compared]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    version = next((one.ours.version for one in done if one.ours.version), "")
    us = KVSTORE_LLAMA if any(one.peer.group == "llama.cpp" for one in done) else KVSTORE
    rows.append(("kvstore", version, us.what, us.setting, "", 1.0))
    for one in done:
        stayed = (
            f"{100 * one.theirs.stayed:.0f}% of its files stayed in the page cache when cold" if one.theirs.stayed > _STAYED else ""
        )
        state = "; ".join(part for part in (one.failure, stayed, *one.theirs.notes) if part)
        pairs = len(one.theirs.warm)
        state = state or f"measured, {pairs} pairs"
        rows.append((one.peer.name, one.theirs.version, one.peer.what, one.peer.setting, state, ratio(one, "warm")))
    columns = ("store", "version", "what it is", "configuration", "state", f"warm restore, {_TIMES}")
    return Table("How each was set up", columns, tuple(rows))


def _plot(done: Sequence[Compared], plan: Plan) -> Plot | None:
    shown = [one for one in done if one.theirs.warm and one.theirs.cold]
    if not shown:
        return None
    names = ("kvstore", *(one.peer.name for one in shown))
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, label in (("warm", "warm"), ("cold", "cold")):
        seconds = [_all_ours(done, name), *(_seconds(one.theirs, name) for one in shown)]
        lines[label] = [(float(i), plan.session_bytes / median(s) / 1e9) for i, s in enumerate(seconds)]
    return Plot(
        "restore", "Restore to where the engine has it", "", "GB/s (more is better)", lines, bars=True, groups=names
    )  # the ratios are taken round by round, the bars are medians of all rounds


def _targets(done: Sequence[Compared]) -> list[Target]:
    rivals = [one for one in _measured(done) if not one.peer.checks]
    found: list[Target] = []

    def least(what: str, value: Callable[[Compared], float | None]) -> None:
        values = [(found_one, one.peer.name) for one in rivals if (found_one := value(one)) is not None]
        if values:
            lowest, name = min(values)
            found.append(
                Target(f"{what}: the nearest that checks nothing ({name}) takes, times kvstore", lowest, 1.0, at_most=False)
            )

    for name, what in MEASURES.items():
        # the default binds this figure's name, which mypy can't infer for a lambda
        least(what, lambda one, name=name: ratio(one, name))  # type: ignore[misc]
    least("bytes on disk with a shared prefix", lambda one: one.theirs.disk / one.ours.disk if one.ours.disk else None)
    return found


def report(groups: Sequence[tuple[str, Plan, Sequence[Compared]]], outcome: Outcome) -> None:
    """Put all that was measured into an outcome.

    Parameters
    ----------
    groups : sequence of (str, Plan, sequence of Compared)
        What is compared with each other, how it is called in titles, and how large it was.
    outcome : Outcome
        Is filled.
    """
    for title, plan, done in groups:
        behind = f": {title}" if title else ""
        outcome.figures[title or "arrays"] = {
            "plan": {**asdict(plan), "shared": plan.shared, "turns": plan.turns, "session_bytes": plan.session_bytes},
            "peers": [_record(one) for one in done],
        }
        tables = _tables(plan, done)
        outcome.tables += [replace(table, title=table.title + behind) for table in tables if table.rows]
        plot = _plot(done, plan)
        if plot:
            name = plot.name + "".join(letter for letter in title if letter.isalnum())
            outcome.plots.append(replace(plot, name=name, title=plot.title + behind))
        outcome.targets += [replace(target, name=target.name + behind) for target in _targets(done)]
        outcome.lines += [_line(one) for one in done]
        stayed = max((one.ours.stayed for one in done), default=0.0)
        if stayed > _STAYED:
            outcome.doubts.append(f"{100 * stayed:.0f}% of kvstore's file stayed in the page cache when it was to be cold")


def _tables(plan: Plan, done: Sequence[Compared]) -> list[Table]:
    common = (
        f"Sessions of {plan.tokens} tokens of {plan.shape.token_bytes / 1024:.4g} KiB, {plan.threads} threads, medians of "
        f"{plan.rounds} pairs (fewer where the last table says so) in which the peer and kvstore alternate. Ratios above 1: "
        "kvstore is faster. What a peer delivers to buffers of its own is then scattered into the engine's arrays, as kvstore "
        "does while it checks: both are given. "
    )
    shared = (
        f"A prompt that shares {plan.shared} tokens with stored sessions. Speeds are of the tokens that were had; the others have "
        "to be computed."
    )
    return [
        _restore_table(done, plan, "warm", "Warm restore", common + "The second restore after opening."),
        _restore_table(
            done, plan, "first", "Warm restore, the first after opening", "Where a map has to be made first, this is part of it."
        ),
        _restore_table(
            done, plan, "cold", "Cold restore", "Files dropped from the page cache and opened anew before each restore."
        ),
        _restore_table(done, plan, "shared", "Restore of a shared prefix", shared),
        _save_table(done, plan, turn=False),
        _save_table(done, plan, turn=True),
        _disk_table(done, plan),
        _safety_table(done),
        behind(done),
        _setting_table(done),
    ]


def _record(one: Compared) -> dict[str, Any]:
    peer = {"name": one.peer.name, "what": one.peer.what, "setting": one.peer.setting, "checks": one.peer.checks}
    measured = {name: ratio(one, name) for name in (*MEASURES, "save_durable", "save", "turn")}
    return {
        **peer,
        "failure": one.failure,
        "installed": one.installed,
        "ratios": measured,
        "peer": asdict(one.theirs),
        "kvstore": asdict(one.ours),
    }


def _line(one: Compared) -> str:
    if not one.installed:
        return f"{one.peer.name:26} {one.failure}"
    parts = [f"{what} {value:.2f}" for name, what in MEASURES.items() if (value := ratio(one, name)) is not None]
    if one.theirs.disk and one.ours.disk:
        parts.append(f"disk {one.theirs.disk / one.ours.disk:.2f}")
    if one.failure and not parts:
        return f"{one.peer.name:26} FAILED: {one.failure}"
    text = f"{one.peer.name:26} {', '.join(parts)} times kvstore; flipped byte: {one.theirs.flipped or 'not tried'}"
    return f"{text}; FAILED: {one.failure}" if one.failure else text
