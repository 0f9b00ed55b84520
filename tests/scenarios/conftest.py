"""A store for a scenario, and the processes that act in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import CAP, assert_sound

from .steps import Actor

Acting = Callable[..., Actor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the scenario's store is."""
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Make the store; it has to be sound in the end."""
    with Store.open(path, max_bytes=CAP) as opened:
        yield opened
        assert_sound(opened)


@pytest.fixture
def actor(path: Path) -> Iterator[Acting]:
    """Start processes that do what they are told; all are killed in the end."""
    with ExitStack() as stack:

        def start(setup: str = "", *, opens: bool = True) -> Actor:
            return stack.enter_context(Actor(path, setup, opens=opens))

        yield start
