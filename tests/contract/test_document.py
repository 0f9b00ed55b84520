"""docs/engines.md is true: its code runs, its engine keeps the contract, and its list of checks is the suite's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import ContractError, contract_checks
from kvstore.testing.contract.suite import CHECKS

from .drivers import PLAIN, HashDriver

DOCUMENT = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def run_page(page: str) -> dict[str, Any]:
    """Run the page's Python, in order, as one module."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    return names


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example's engine passes the whole suite, and says so."""
    names = run_page(DOCUMENT)
    assert len(names["report"].checks) == len(CHECKS)
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        ('self.memory = restored.states()["memory"]', "restored.states()", "round_trip"),
        ("        self.position = 0\n", "        self.position = getattr(self, 'position', 0)\n", "reset_forgets"),
        (" if stop == self.position else {}", "", "capture_in_pieces"),
        ("seen = np.sum", "seen = 0 * np.sum", "negative_controls"),
    ],
)
def test_the_page_with_a_mistake(right: str, wrong: str, check: str) -> None:
    """A line of the example's engine that is wrong fails the suite, by the check that is meant for it."""
    assert DOCUMENT.count(right) == 1
    with pytest.raises(ContractError, match=f"FAILED {check}"):
        run_page(DOCUMENT.replace(right, wrong))


def test_the_table_of_checks() -> None:
    """The page's table lists the checks of the suite, in the order in which they run."""
    table = re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("## The contract suite")[1], re.MULTILINE)
    assert table == list(CHECKS) == [check.name for check in contract_checks(HashDriver(PLAIN))]
