"""A store for a test of the tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import CAP, assert_sound


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Make a store; it has to be sound in the end."""
    with Store.open(path, max_bytes=CAP, lock_timeout=2.0) as opened:
        yield opened
        assert_sound(opened)
