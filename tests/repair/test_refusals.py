"""What a repair refuses, by name, and leaves as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lmdb
import pytest

from kvstore import KVStoreError, Store
from kvstore.errors import FormatVersionError, NotAStoreError, StoreBusyError, StoreFullError, StoreMissingError, StoreOwnerError
from kvstore.kernel import crc32c
from tests.repair.damage import zero
from tests.support import CAP, child_at, data_file, plain_layout, run_child


def test_open_in_this_process(copy: Path) -> None:
    """A store that this process has open is not repaired."""
    with Store.open(copy) as store:
        with pytest.raises(StoreBusyError, match="before you repair it"):
            Store.repair(copy)
        assert store.namespace(plain_layout()).match([0, *range(10)]) is not None
    assert Store.repair(copy).ok


@pytest.mark.parametrize("damaged", [False, True])
def test_open_in_another_process(copy: Path, damaged: bool) -> None:
    """A store that another process has open is not repaired, whatever it looks like."""
    with child_at("store = Store.open(path)\nprint('open', flush=True)\nsys.stdin.readline()", copy):
        if damaged:
            zero(copy, 0)
        before = data_file(copy).read_bytes()
        with pytest.raises(StoreBusyError, match="another process"):
            Store.repair(copy, lock_timeout=0.1)
        assert data_file(copy).read_bytes() == before
    assert os.listdir(copy.parent) == ["s"]


def test_no_room(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for the new file, that is said with both numbers before anything is written."""
    zero(copy, 0, 2)
    usage = shutil.disk_usage(copy)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12345))
    with pytest.raises(StoreFullError, match=r"takes \d+ bytes, 12345 are free"):
        Store.repair(copy)
    assert os.listdir(copy.parent) == ["s"]


def test_what_is_no_store(tmp_path: Path) -> None:
    """Nothing, an empty directory, a file, a foreign directory or LMDB file, and any bytes: refused and left alone."""
    with pytest.raises(StoreMissingError):
        Store.repair(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreMissingError):
        Store.repair(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStoreError):
        Store.repair(tmp_path / "file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo").write_text("x")
    with pytest.raises(NotAStoreError):
        Store.repair(tmp_path / "foreign")
    assert os.listdir(tmp_path / "foreign") == ["photo"]
    (tmp_path / "other").mkdir()
    environment = lmdb.open(str(tmp_path / "other"), max_dbs=4)
    with environment.begin(write=True) as txn:
        txn.put(b"store", b"theirs", db=environment.open_db(b"meta", txn=txn))
    environment.close()
    before = data_file(tmp_path / "other").read_bytes()
    with pytest.raises(NotAStoreError):
        Store.repair(tmp_path / "other", max_bytes=1 << 30)
    assert data_file(tmp_path / "other").read_bytes() == before
    assert sorted(os.listdir(tmp_path / "other")) == ["data.mdb", "lock.mdb"]
    (tmp_path / "bytes").mkdir()
    data_file(tmp_path / "bytes").write_bytes(os.urandom(100_000))
    with pytest.raises(NotAStoreError):
        Store.repair(tmp_path / "bytes", max_bytes=1 << 30)
    assert os.listdir(tmp_path / "bytes") == ["data.mdb"]


@pytest.mark.parametrize("damaged", [False, True])
def test_another_version(copy: Path, damaged: bool) -> None:
    """A store of a newer format is that version's to repair."""
    raw = data_file(copy).read_bytes()
    old = b"kvstore\0" + (1).to_bytes(4, "little")
    new = b"kvstore\0" + (2).to_bytes(4, "little")
    old, new = (body + crc32c(body).to_bytes(4, "little") for body in (old, new))
    assert old in raw
    data_file(copy).write_bytes(raw.replace(old, new))
    if damaged:
        zero(copy, 0)
    before = data_file(copy).read_bytes()
    with pytest.raises(FormatVersionError):
        Store.repair(copy)
    assert data_file(copy).read_bytes() == before


def test_symbolic_links_are_not_followed(copy: Path) -> None:
    """A data file that is a symbolic link is refused."""
    data_file(copy).rename(copy.parent / "elsewhere")
    data_file(copy).symlink_to(copy.parent / "elsewhere")
    with pytest.raises(KVStoreError, match="symbolic link"):
        Store.repair(copy)


def test_a_disk_that_fills_up(copy: Path) -> None:
    """Where the new file can't be written to its end, the repair fails by name and the damaged store is left as it is."""
    zero(copy, 0, 2)
    before = data_file(copy).read_bytes()
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        Store.repair(path)
    except KVStoreError as error:
        print(type(error).__name__)
    """
    assert run_child(code, copy) in ("StoreFullError", "DiskError")
    assert data_file(copy).read_bytes() == before
    assert os.listdir(copy.parent) == ["s"]
    assert Store.repair(copy).sessions_lost == 0


def test_what_may_be_somebodys(copy: Path) -> None:
    """What stands where the new store would be written and isn't what a killed repair leaves stays whole, and is named."""
    zero(copy, 0, 2)
    beside = copy.parent / f".{copy.name}.repair"
    beside.mkdir(mode=0o700)
    (beside / "thesis.tex").write_text("mine")
    with pytest.raises(StoreOwnerError, match=r"\.s\.repair.*move it away"):
        Store.repair(copy)
    assert (beside / "thesis.tex").read_text() == "mine"
    (beside / "thesis.tex").unlink()
    (beside / "data.mdb").write_bytes(b"half")
    assert Store.repair(copy).moved_to
    assert not beside.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_keeps_his_store(copy: Path) -> None:
    """Who has his store repaired or its cap lowered by root owns the new file, too."""
    for each in (copy, *copy.iterdir()):
        os.chown(each, 12345, 54321)
    with Store.open(copy, any_owner=True) as store:
        store.resize(CAP // 2)
    for _ in range(2):
        assert {(p.stat().st_uid, p.stat().st_gid) for p in copy.iterdir()} == {(12345, 54321)}
        zero(copy, 0, 2)
        Store.repair(copy, any_owner=True)
