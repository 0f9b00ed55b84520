"""What the demo prints and writes: a table, the summary below it, and both as JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benches.demo.run import ANSWER, Run, Turn, differing
from benches.demo.server import MODEL
from benches.llamacpp.library import BUILD
from benches.machine import upstream

__all__ = ["machine", "record", "summary", "table"]

_MB = 1e6


def machine() -> dict[str, str | int | float]:
    """Say what the figures were measured on, and what makes them untrustworthy."""
    cpu = "unknown"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0] if lines else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": upstream(platform.release()),
        "engine": BUILD,
        "model": MODEL,
    }


def row(turn: Turn) -> dict[str, Any]:
    """One turn as the table and the JSON have it."""
    promoted = turn.served["ttft"] if turn.promoted else None
    return {
        "prompt": turn.story.name,
        "turn": turn.number,
        "tokens": len(turn.tokens),
        "reused": turn.served["reused"],
        "read": len(turn.tokens) - turn.served["reused"],
        "ttft_cold": turn.cold,
        "ttft_promoted": promoted,
        "ratio": turn.cold / promoted if promoted else None,
        "restore_seconds": turn.served["restore"],
        "save_seconds": turn.served["save"],
        "answer_equal": turn.served["answer"] == turn.reference["answer"],
        "state_equal": not differing(turn.served, turn.reference),
        "logits_equal": turn.served["logits"] == turn.reference["logits"],
        "needle": turn.needle,
        "needle_found": turn.found,
        "answer": turn.served["text"],
    }


def table(run: Run) -> Table:
    """Make the table: a row a turn."""
    made = Table(
        title=f"Time to first token, {MODEL}, three sessions of {run.length} tokens and more", title_justify="left", box=SIMPLE_HEAD
    )
    made.add_column("prompt", no_wrap=True)
    for heading in ("turn", "tokens", "reused", "read", "cold\nseconds", "promoted\nseconds", "ratio"):
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in ("answer\nequal", "state\nequal", "logits\nequal"):
        made.add_column(heading, justify="center", no_wrap=True)
    for turn in run.turns:
        r = row(turn)
        times = (f"{r['ttft_promoted']:.3f}", f"{r['ratio']:.0f}x") if turn.promoted else ("-", "-")
        equal = ("yes" if r[name] else "[red]NO[/red]" for name in ("answer_equal", "state_equal", "logits_equal"))
        counts = (str(r[name]) for name in ("turn", "tokens", "reused", "read"))
        made.add_row(r["prompt"], *counts, f"{r['ttft_cold']:.2f}", *times, *equal)
    return made


def _figures(run: Run) -> dict[str, Any]:
    last = [turn for turn in run.turns if turn.number == max(t.number for t in run.turns)]
    lengths = [len(turn.evaluated) for turn in last]
    row_bytes = int(run.layout.token_bytes)
    distinct = sum(lengths) - (len(lengths) - 1) * run.shared
    separate = sum(lengths) * row_bytes
    every_turn = sum(len(turn.evaluated) for turn in run.turns) * row_bytes
    cold = [turn for turn in run.turns if not turn.promoted]
    promoted = [turn for turn in run.turns if turn.promoted]
    restored = sum(turn.served["reused"] for turn in promoted) * row_bytes
    restoring = sum(turn.served["restore"] for turn in promoted)
    return {
        "stored_bytes": int(run.store["payload_bytes"]),
        "live_bytes": int(run.store["live_bytes"]),
        "allocated_bytes": int(run.store["allocated_bytes"]),
        "separate_bytes": separate,
        "distinct_bytes": distinct * row_bytes,
        "saved_by_sharing_bytes": separate - int(run.store["payload_bytes"]),
        "rewritten_every_turn_bytes": every_turn,
        "save_seconds": sum(turn.served["save"] for turn in run.turns),
        "save_seconds_first_turns": sum(turn.served["save"] for turn in cold),
        "restore_seconds_mean": restoring / len(promoted),
        "restore_bytes_per_second": restored / restoring if restoring else 0.0,
        "prefill_tokens_per_second": sum(len(t.tokens) for t in cold) / sum(t.cold for t in cold),
        "shared_blocks_checked": int(sum(stats["shared_blocks_checked"] for stats in run.tiers)),
        "differing_blocks": int(sum(stats["differing_blocks"] for stats in run.tiers)),
    }


def summary(run: Run) -> list[str]:
    """Make the lines below the table."""
    f = _figures(run)
    found = sum(turn.found for turn in run.turns)
    control = run.control
    return [
        f"stored: {f['stored_bytes'] / _MB:.1f} MB of rows for three sessions, {f['live_bytes'] / _MB:.1f} MB with index and "
        f"padding; separate snapshots would take {f['separate_bytes'] / _MB:.1f} MB",
        f"sharing the first {run.shared} tokens saved {f['saved_by_sharing_bytes'] / _MB:.1f} MB; rewriting whole sessions "
        f"turn by turn would have written {f['rewritten_every_turn_bytes'] / _MB:.1f} MB",
        f"time to save: {f['save_seconds']:.2f} s for {len(run.turns)} turns, {f['save_seconds_first_turns']:.2f} s of it for "
        f"the first three; with every shared block compared with what the engine holds: {f['shared_blocks_checked']} compared, "
        f"{f['differing_blocks']} differ",
        f"time to restore: {1e3 * f['restore_seconds_mean']:.0f} ms a turn, "
        f"{f['restore_bytes_per_second'] / 1e9:.2f} GB/s, every byte validated",
        f"prefill: {f['prefill_tokens_per_second']:.0f} tokens a second; answers of {ANSWER} tokens; the uninterrupted run "
        f"found {found} of {len(run.turns)} needles",
        f"negative control: one byte flipped in block {control.damage.index} of {control.damage.blocks}; promote reused "
        f"{control.served['reused']} instead of {control.turn.served['reused']} tokens, first token after "
        f"{control.served['ttft']:.2f} s, the answer {control.served['text'].strip().splitlines()[0]!r}",
    ]


def record(run: Run, wrong: list[str]) -> dict[str, Any]:
    """Everything as JSON takes it."""
    control = run.control
    return {
        "ok": not wrong,
        "failures": wrong,
        "machine": machine(),
        "length": run.length,
        "shared_tokens": run.shared,
        "token_bytes": run.layout.token_bytes,
        "block_tokens": run.layout.block_tokens,
        "seconds": run.seconds,
        "rows": [row(turn) for turn in run.turns],
        "figures": _figures(run),
        "control": {
            "block": control.damage.index,
            "position": control.damage.position,
            "reused": control.served["reused"],
            "reused_undamaged": control.turn.served["reused"],
            "ttft": control.served["ttft"],
            "log": control.served["log"],
            "fallbacks": control.served["stats"]["fallbacks"],
            "answer_equal": control.served["answer"] == control.turn.reference["answer"],
            "state_equal": not differing(control.served, control.reference),
            "logits_equal": control.served["logits"] == control.reference["logits"],
        },
        "store": run.store,
        "tiers": run.tiers,
    }
