"""The adapter keeps the contract that engines have with kvstore."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.contract import check_engine

from .driver import Driver

# full attention, a window, delta rule, a convolution alone, both kinds in one layer, recurrent layers alone
CASES = [
    ("qwen3", "f16"),
    ("gemma3_text", "bf16"),
    ("qwen3_next", "bf16"),
    ("lfm2", "f32"),
    ("falcon_h1", "f16"),
    ("mamba2", "f32"),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_contract_holds(name: str, dtype: str, tmp_path: Path) -> None:
    """Restores are bit-exact and complete, failures leave nothing behind, and no stream or state could be left out unnoticed."""
    check_engine(Driver(name, dtype), store_path=tmp_path / "s").raise_for_failures()
