"""The libraries that fail reads and writes, each built once a run."""

from __future__ import annotations

import shutil
import subprocess
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
