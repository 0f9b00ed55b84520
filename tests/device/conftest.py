"""A driver that works on host memory, and a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Store
from tests.device.fake import Fake, build
from tests.support import CAP, assert_sound


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Build the driver once."""
    return Fake(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def fake(built: Fake) -> Iterator[Fake]:
    """Give a driver that has done nothing yet; nothing may be left of the test in the end."""
    built.reset()
    yield built
    built.assert_clean()
    built.reset()


@pytest.fixture
def broken(built: Fake) -> Iterator[Fake]:
    """Give the same driver to a test that looks at what is left itself."""
    built.reset()
    yield built
    built.reset()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Make a store; it has to be sound in the end."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as opened:
        yield opened
        assert_sound(opened)
