"""What a killed resize or creation leaves: the next exclusive opener removes it, and nothing that may be somebody's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.env.leftovers import beside_of
from kvstore.errors import StoreMissingError, StoreOwnerError
from tests.support import CAP, assert_restores, assert_sound, child, child_at, plain_layout, save

TOKENS = list(range(40))

KILLED = """
import kvstore.env.creating as creating, kvstore.env.resizing as resizing, kvstore.env.opening as opening
where, name = sys.argv[2].split(".")
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
setattr({"creating": creating, "resizing": resizing, "opening": opening, "Path": resizing.Path}[where], name, die)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a store with a session."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
    return tmp_path / "s"


def killed_at(point: str, code: str, path: Path) -> None:
    """Run code in a process that is killed when it comes to a point."""
    process = child(KILLED + code, path, point)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -9, err


@pytest.mark.parametrize(
    "point",
    ["resizing._set_map_bytes", "resizing._rebuild_some", "resizing.verify_file", "Path.replace", "resizing._sync_directory"],
)
def test_a_killed_resize(path: Path, point: str) -> None:
    """Wherever a resize is killed, the copy that it left goes with the next opening; the store is the old one or the new one."""
    killed_at(point, "Store.open(path).resize(CAP // 2)", path)
    assert sorted(os.listdir(path.parent)) == [".s.resize", "s"]
    with Store.open(path) as store:
        assert sorted(os.listdir(path.parent)) == ["s"]
        assert store.max_bytes == (CAP // 2 if point == "resizing._sync_directory" else CAP)
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)
        assert_sound(store)
        assert store.resize(5 << 20).max_bytes == 5 << 20
        assert sorted(os.listdir(path.parent)) == ["s"]


@pytest.mark.parametrize(
    "point", ["Path.rename", "opening._sync_directory", "opening.initialise", "opening._read_identity", "creating._space_out"]
)
def test_a_killed_creation(tmp_path: Path, point: str) -> None:
    """Wherever a creation is killed, the next opener with a cap makes the store, and nothing is left over."""
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    killed_at(point, "Store.open(path, max_bytes=CAP)", path)
    if not (path / "data.mdb").exists():
        with pytest.raises(StoreMissingError):
            Store.open(path)
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        assert_sound(store)
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.mdb", "open.lock", "write.lock"]


def test_a_new_file_beside_the_old_one(path: Path) -> None:
    """A half-made data file beside a whole one goes with the first opener, and not under a store that is in use."""
    new = path / "data.mdb.new"
    with child_at("store = Store.open(path)\nprint('open', flush=True)\nsys.stdin.read()", path):
        new.write_bytes(b"half")
        with Store.open(path):
            assert new.exists()
    with Store.open(path) as store:
        assert not new.exists()
        assert_sound(store)


def with_another_file(beside: Path) -> None:
    """A file that a resize does not make."""
    (beside / "thesis.tex").write_text("mine")


def with_a_directory(beside: Path) -> None:
    """A directory in the place of a file."""
    (beside / "data.mdb").mkdir()


def open_to_others(beside: Path) -> None:
    """A directory that others can look into."""
    (beside / "data.mdb").write_text("mine")
    beside.chmod(0o755)


def a_link(beside: Path) -> None:
    """A symbolic link to a directory of somebody's."""
    beside.rmdir()
    (beside.parent / "elsewhere").mkdir(mode=0o700)
    (beside.parent / "elsewhere" / "data.mdb").write_text("mine")
    beside.symlink_to(beside.parent / "elsewhere")


def a_file(beside: Path) -> None:
    """A file."""
    beside.rmdir()
    beside.write_text("mine")


@pytest.mark.parametrize("make", [with_another_file, with_a_directory, open_to_others, a_link, a_file])
def test_what_may_be_somebodys(path: Path, make: Callable[[Path], None]) -> None:
    """What stands in the place of such a copy and isn't certainly one stays whole; lowering the cap is refused and names it."""
    beside = beside_of(path)
    beside.mkdir(mode=0o700)
    make(beside)
    before = sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in path.parent.rglob("*") if path not in p.parents)
    with Store.open(path) as store:
        with pytest.raises(StoreOwnerError, match=r"\.s\.resize"):
            store.resize(CAP // 2)
        assert store.max_bytes == CAP
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)
    assert (
        sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in path.parent.rglob("*") if path not in p.parents) == before
    )
