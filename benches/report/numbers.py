"""Figures as they are printed: as many digits as they are good for."""

from __future__ import annotations

import math
import re

from benches.harness import Cell

__all__ = ["cell", "is_ratio", "number", "ratio", "spread"]


def is_ratio(head: str) -> bool:
    """Whether a column is one of ratios, by its head."""
    return re.search(r"\bratios?\b|(^|, )(of|times) ", head.lower()) is not None


def number(value: float) -> str:
    """A figure of any unit, by its size: three digits that say something, and thousands apart."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "none"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text if digits < 9 else f"{value:.2e}"


def ratio(value: float) -> str:
    """A ratio: two places, and more only of small ones."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else number(float(value))


def cell(value: Cell, head: str) -> str:
    """A cell of a table, by the head of its column."""
    if value is None:
        return "–"
    if value is True:
        return "yes"
    if value is False:
        return "**no**"
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    return ratio(float(value)) if is_ratio(head) else number(value)


def spread(values: list[float]) -> str:
    """The least and the largest of several ratios."""
    low, high = ratio(min(values)), ratio(max(values))
    return low if low == high else f"{low} to {high}"
