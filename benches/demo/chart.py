"""The chart: time to first token of every turn, cold and promoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw"]

_COLD, _PROMOTED = "#8a8f98", "#1f77b4"


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the rows of a run's record into a PNG file."""
    import matplotlib as mpl  # here: it takes a second to import, and only the end of a run needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = record["rows"]
    at = range(len(rows))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    axes.bar([i - 0.2 for i in at], [row["ttft_cold"] for row in rows], 0.4, color=_COLD, label="cold: everything is read again")
    warm = [(i, row) for i, row in enumerate(rows) if row["ttft_promoted"]]
    times = [row["ttft_promoted"] for _, row in warm]
    bars = axes.bar([i + 0.2 for i, _ in warm], times, 0.4, color=_PROMOTED, label="promoted from the store")
    axes.bar_label(bars, [f"{row['ratio']:.0f}x" for _, row in warm], padding=2, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, seconds (log scale)")
    axes.set_xticks(list(at), [f"{row['prompt']}\nturn {row['turn']}\n{row['tokens']} tokens" for row in rows], fontsize=7)
    axes.set_title(f"{record['machine']['model']} on {record['machine']['cores']} cores: {record['machine']['cpu']}", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper right", ncols=2, fontsize=8)
    axes.set_ylim(top=axes.get_ylim()[1] * 2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
