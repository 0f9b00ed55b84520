"""The figures that a run of the tests prints: how often something was tried, from which seed, and what held each time."""

from __future__ import annotations

from tests.support import SCALE, SEED

__all__ = ["Figures"]


class Figures:
    """What the tests of one run have counted, printed when it ends (tests/conftest.py)."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, test: str, *counts: str) -> None:
        """Note what a test has counted. A test calls it when all that it says has been required to hold."""
        self._lines.append(f"{test}: {', '.join(counts)}")

    def report(self) -> list[str]:
        """Give the lines to print; none where no test has counted anything."""
        return [*self._lines, f"(scale {SCALE:g}, seed {SEED}: KVSTORE_TEST_SCALE and KVSTORE_TEST_SEED)"] if self._lines else []
