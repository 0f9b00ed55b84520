"""Hypothesis' profile for the whole suite, and the figures that a run prints when it ends."""

import pytest
from hypothesis import HealthCheck, settings

from tests.figures import Figures

settings.register_profile(
    "kvstore",
    deadline=None,  # shared machines: a slow example is no failure
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvstore")

_FIGURES = Figures()


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Take what a test has counted."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, also under -q."""
    lines = _FIGURES.report()
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
