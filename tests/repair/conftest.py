"""Stores to damage: made once, copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import CAP, hybrid_layout, plain_layout, save

SESSIONS = [[first % 3, *range(10 + 13 * first)] for first in range(6)]
TURNS = [[7, *range(100, 100 + length)] for length in (20, 45, 71)]  # a conversation: each turn has a checkpoint


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of a few sessions in three namespaces, closed."""
    path = tmp_path_factory.mktemp("repair") / "s"
    with Store.open(path, max_bytes=CAP) as store:
        for namespace in (
            store.namespace(plain_layout()),
            store.namespace(hybrid_layout()),
            store.namespace(plain_layout(), salt=b"x"),
        ):
            for tokens in SESSIONS:
                save(namespace, tokens)
        for tokens in TURNS:
            save(store.namespace(hybrid_layout()), tokens)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Copy the store."""
    return Path(shutil.copytree(whole, tmp_path / "s"))
