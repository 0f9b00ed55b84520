"""A store for a test of the adapter, and sessions of a model in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store
from kvstore.adapters.transformers import TransformersSessions, weights_digest
from tests.support import assert_sound

from .models import BLOCK, model

Open = Callable[..., TransformersSessions]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Make a store; it has to be sound in the end."""
    with Store.open(path, max_bytes=64 << 20, lock_timeout=2.0) as opened:
        yield opened
        assert_sound(opened)


@pytest.fixture
def sessions(store: Store) -> Iterator[Open]:
    """Open a model's sessions in the store."""
    with ExitStack() as stack:

        def opened(name: str, dtype: str = "f32", made: Any = None, **settings: Any) -> TransformersSessions:
            made = model(name, dtype) if made is None else made
            settings = {"name": name, "weights": weights_digest(made), "block_tokens": BLOCK, **settings}
            return stack.enter_context(TransformersSessions(store, made, **settings))

        yield opened
