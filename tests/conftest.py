"""Hypothesis' profile and seed for the whole suite, and the figures that a run prints when it ends."""

import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.figures import Figures
from tests.support import SEED

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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis begin from the run's seed, unless it is told another; and let Ctrl-C reach the processes that tests start.

    A shell has what it runs in the background ignore it, and so would they.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, also under -q."""
    lines = _FIGURES.report()
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
