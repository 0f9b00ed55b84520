"""Plots as PNG files: the same bytes from the same figures, and the same colours for the same places in a plot."""

from __future__ import annotations

import io
from typing import Any

from benches.harness import Plot
from benches.report.numbers import number

__all__ = ["MissingLibrary", "draw"]

# told apart by those who can't tell red from green
_OWN = "#0072b2"
_COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_MARKS = "osD^vPX*"
_TICKS = 10
_INCHES, _DPI = (7.2, 3.9), 100


class MissingLibrary(Exception):
    """matplotlib isn't installed."""


def draw(plot: Plot) -> bytes:
    """Draw a plot, dark on white whatever surrounds it; give the bytes of the file.

    Raises
    ------
    MissingLibrary
        matplotlib isn't installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibrary(str(error)) from error
    with mpl.rc_context():
        mpl.rcdefaults()  # what the user has set must not change the file
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        (_bars if plot.bars else _lines)(axes, plot)
        axes.set_title(plot.title, fontsize=10)
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        if plot.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.grid(axis="y" if plot.bars else "both", alpha=0.3)
        if len(plot.lines) > 1:
            axes.legend(fontsize=8)
        made = io.BytesIO()
        # without the version and the time, which would change the file where the figures have not
        figure.savefig(made, format="png", metadata={"Software": None})
    return made.getvalue()


def _colours(plot: Plot) -> list[str]:
    """A colour for each line; kvstore's is the same in all plots."""
    others = iter(range(len(plot.lines)))
    return [_OWN if name.startswith("kvstore") else _COLOURS[next(others) % len(_COLOURS)] for name in plot.lines]


def _lines(axes: Any, plot: Plot) -> None:
    for place, ((name, points), colour) in enumerate(zip(plot.lines.items(), _colours(plot), strict=True)):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=colour,
            marker=_MARKS[place % len(_MARKS)] if len(points) <= 40 else None,
            markersize=4,
            linewidth=1.4,
        )
    values = sorted({x for points in plot.lines.values() for x, _ in points})
    if plot.log_x:
        axes.set_xscale("log")
    evenly = values == [values[0] + place for place in range(len(values))] if values else False
    if len(values) <= _TICKS and (evenly or (values and plot.log_x)):
        axes.set_xticks(values, [number(int(x) if x == int(x) else x) for x in values])
        axes.minorticks_off()
    elif all(x == int(x) for x in values) and not plot.log_x:
        axes.xaxis.get_major_locator().set_params(integer=True)


def _bars(axes: Any, plot: Plot) -> None:
    count = max(len(plot.lines), 1)
    width = 0.8 / count
    for place, ((name, points), colour) in enumerate(zip(plot.lines.items(), _colours(plot), strict=True)):
        axes.bar(
            [x + (place - (count - 1) / 2) * width for x, _ in points],
            [y for _, y in points],
            width,
            label=name,
            color=colour,
        )
    names = plot.groups or tuple(str(x) for x in sorted({x for points in plot.lines.values() for x, _ in points}))
    long = any(len(name) > 12 for name in names) or len(names) > 8
    axes.set_xticks(range(len(names)), names, rotation=20 if long else 0, ha="right" if long else "center", fontsize=8)
