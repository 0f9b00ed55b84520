"""The contract suite passes engines that are right, and fails each that is broken in one way, by the check that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import KVStoreError, Store
from kvstore.testing import ContractCheck, ContractError, SyntheticHybrid, check_engine, contract_checks
from kvstore.testing.contract.suite import CHECKS

from .broken import unread
from .drivers import HYBRID, LAYOUTS, HashDriver, HybridDriver
from .mutants import GOOD, MUTANTS


@pytest.mark.parametrize("name", GOOD)
def test_a_good_engine_passes(name: str, tmp_path: Path) -> None:
    """An engine that keeps its contract passes all checks, and leaves a store without sessions and no engine open."""
    driver = GOOD[name]
    report = check_engine(driver, store_path=tmp_path / "s")
    report.raise_for_failures()
    assert not report.failures
    assert len(report.checks) == len({check.name for check in report.checks}) == 15
    assert str(report).count("\nok ") == 15
    assert isinstance(driver, HashDriver)
    assert driver.alive == 0
    with Store.open(tmp_path / "s") as store:
        assert store.stats().blocks == 0


@pytest.mark.parametrize("check", contract_checks(HybridDriver()), ids=str)
def test_the_synthetic_hybrid(check: ContractCheck[SyntheticHybrid], tmp_path: Path) -> None:
    """The synthetic hybrid keeps its contract: the suite as pytest cases."""
    assert check.run(tmp_path / "s").passed


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_fails(name: str, tmp_path: Path) -> None:
    """An engine that is broken in one way fails the check that is meant for it, which says what was seen and what to do."""
    mutant = MUTANTS[name]
    [check] = [check for check in contract_checks(mutant.driver) if check.name == mutant.check]
    with pytest.raises(ContractError) as caught:
        check.run(tmp_path / "s")
    assert isinstance(caught.value, KVStoreError)
    assert isinstance(caught.value, AssertionError)
    assert f"FAILED {mutant.check}: " in str(caught.value)
    assert mutant.says in str(caught.value)
    assert "to do: " in str(caught.value)


@pytest.mark.parametrize("part", ["k", "window"])
def test_only_the_controls_notice_a_part_that_is_never_read(part: str, tmp_path: Path) -> None:
    """An engine that saves and restores a part and never reads it passes everything else: equality alone doesn't show it."""
    report = check_engine(HashDriver(HYBRID, unread(part)), store_path=tmp_path / "s")
    assert [check.name for check in report.failures] == ["negative_controls"]
    with pytest.raises(ContractError, match=f"omission of {part} would go unnoticed"):
        report.raise_for_failures()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_another_length_and_seed(name: str, tmp_path: Path) -> None:
    """The suite holds at other lengths and with other tokens; a length that doesn't reach beyond two blocks is refused."""
    driver = HashDriver(LAYOUTS[name])
    check_engine(driver, store_path=tmp_path / "s", length=34, seed=7).raise_for_failures()
    with pytest.raises(ValueError, match="at least 34"):
        check_engine(driver, store_path=tmp_path / "s", length=33)


def test_each_check_can_fail() -> None:
    """There is a broken engine for each check of the suite."""
    assert {mutant.check for mutant in MUTANTS.values()} == set(CHECKS)


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 24])
def test_blocks_of_other_sizes(block_tokens: int, tmp_path: Path) -> None:
    """The suite holds for blocks of one position, and for blocks that are no power of two."""
    streams = tuple(stream for stream in HYBRID.streams if block_tokens % stream.tokens_per_row == 0)
    layout = replace(HYBRID, streams=streams, block_tokens=block_tokens)
    check_engine(HashDriver(layout), store_path=tmp_path / "s").raise_for_failures()
