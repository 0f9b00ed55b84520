"""The public face: what is in it, what importing it costs, and what a type checker makes of code that uses it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from tests.support import ROOT, run_child


def test_importing_is_cheap() -> None:
    """Importing the library brings in no engine, no device library, no server framework and no adapter, and starts no thread."""
    code = """
    import subprocess, sys
    print(subprocess.run([sys.executable, "-c", '''
    import sys, threading
    import kvstore
    heavy = {"torch", "asyncio", "xllamacpp", "llama_cpp", "cupy", "jax", "transformers", "matplotlib", "rich", "multiprocessing",
             "hypothesis", "pytest", "scipy", "pandas", "kvstore.adapters", "kvstore.testing", "kvstore.cli"}
    print(sorted(heavy & set(sys.modules)), threading.active_count())
    '''.replace("\\n    ", "\\n")], capture_output=True, text=True, check=True).stdout.strip())
    """
    assert run_child(code, "-") == "[] 1"


def test_importing_opens_nothing(tmp_path: Path) -> None:
    """Importing the library writes nothing and needs no configuration, home directory or environment variables."""
    code = "import kvstore, os; print(os.listdir('.'))"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert result.stdout.strip() == "[]"


def test_all_is_what_there_is() -> None:
    """Each name of `__all__` is there and documented, the list is sorted, and nothing public is left out of it."""
    assert kvstore.__all__ == sorted(kvstore.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert len(set(kvstore.__all__)) == len(kvstore.__all__)
    for name in kvstore.__all__:
        thing = getattr(kvstore, name)
        if inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing):
            assert inspect.getdoc(thing), name
    public = {
        name
        for name, thing in vars(kvstore).items()
        if not name.startswith("_") and (not inspect.ismodule(thing) or name == "errors") and name != "logging"
    }
    assert public == set(kvstore.__all__)
    assert kvstore.__version__.count(".") == 2


def test_errors_are_all_listed() -> None:
    """Every error class of the errors module is in its `__all__`."""
    defined = {name for name, thing in vars(kvstore.errors).items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    assert defined == set(kvstore.errors.__all__)


@pytest.mark.parametrize(
    "kind",
    [
        kvstore.Store,
        kvstore.Namespace,
        kvstore.Lease,
        kvstore.SessionTier,
        kvstore.WriteBehind,
        kvstore.Layout,
        kvstore.Stream,
        kvstore.Staging,
        kvstore.Transfer,
        kvstore.DeviceTransfer,
    ],
)
def test_public_methods_are_documented(kind: type) -> None:
    """Every public method and property of the classes that people use says what it does."""
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{kind.__name__}.{name}"


def test_the_package_says_that_it_is_typed() -> None:
    """The marker by which type checkers use the annotations of an installed package is there."""
    assert (Path(kvstore.__file__).parent / "py.typed").exists()


def test_a_type_checker_accepts_user_code(tmp_path: Path) -> None:
    """mypy, at its strictest, accepts a file of code as a user writes it, and refuses it with a mistake in it."""
    pytest.importorskip("mypy")
    sample = ROOT / "tests" / "typing_sample.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent"]
    accepted = subprocess.run([*command, str(sample)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert accepted.returncode == 0, accepted.stdout
    wrong = tmp_path / "wrong.py"
    mistakes = '\nStore.open("x", max_bytes="1G")\nreveal_type(Store.open("x").stats().blocks)\n'
    wrong.write_text(sample.read_text() + mistakes)
    refused = subprocess.run([*command, str(wrong)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert refused.returncode == 1
    assert 'incompatible type "str"' in refused.stdout
    assert 'Revealed type is "int"' in refused.stdout or 'Revealed type is "builtins.int"' in refused.stdout
