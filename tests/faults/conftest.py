"""The libraries that fail reads and writes, each built once a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def build(name: str, directory: Path) -> Path:
    """Build a library to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler, as the package does"
    library = directory / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def bad_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build what fails reads."""
    return build("bad_reads", tmp_path_factory.mktemp("bad_reads"))


@pytest.fixture(scope="session")
def bad_writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build what fails writes."""
    return build("bad_writes", tmp_path_factory.mktemp("bad_writes"))


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """Give a directory in memory, where there is room: for tests that wait for the disk a thousand times and look at no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir=memory) as made:
        yield Path(made)
