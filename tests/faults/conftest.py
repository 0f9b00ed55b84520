"""The library that fails reads, built once a run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bad_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler, as the package does"
    library = tmp_path_factory.mktemp("bad_reads") / "bad_reads.so"
    source = Path(__file__).with_name("bad_reads.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library
