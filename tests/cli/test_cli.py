"""The command line: what a person sees of a store, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store
from kvstore.cli import main
from tests.support import CAP, data_file, flip, hybrid_layout, plain_layout, restored, save

SESSION = [t % 5 for t in range(100)]
OTHER = [9, *SESSION]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two sessions in one namespace and one in another."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, SESSION)
        save(namespace, OTHER)
        save(store.namespace(hybrid_layout(), salt=b"tenant"), SESSION)
    return tmp_path / "s"


def run_json(capsys: pytest.CaptureFixture[str], *args: str | Path) -> Any:
    """Run a command with --json; it has to succeed."""
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stats(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stats` shows what Store.stats counts, for people and as JSON."""
    found = run_json(capsys, "stats", path)
    assert found["max_bytes"] == CAP
    assert found["namespaces"] == 2
    assert found["blocks"] > 0
    assert 0 < found["payload_bytes"] < found["live_bytes"] <= found["file_bytes"] <= CAP
    assert main(["stats", str(path)]) == 0
    out = capsys.readouterr().out
    assert "16.0 MiB" in out
    assert str(path) in out


def test_ls(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` shows each namespace with its sessions, tokens and checkpoints."""
    infos = {info["model"]: info for info in run_json(capsys, "ls", path)}
    assert infos["plain"]["sessions"] == 2
    assert infos["plain"]["tokens"] == 201
    assert infos["hybrid"]["checkpoints"] == 1
    assert main(["ls", str(path)]) == 0
    out = capsys.readouterr().out
    assert infos["plain"]["namespace_id"][:16] in out
    assert "hybrid" in out


def test_verify_finds_a_flipped_byte(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` has status 0 on a whole store; `verify --deep` has status 1 and names the block once a byte is flipped."""
    assert run_json(capsys, "verify", path, "--deep")["ok"] is True
    with Store.open(path) as store, store.namespace(plain_layout()).lease(SESSION) as lease:
        block = lease.blocks[1]
        offset, name = block.file_offset + 5, block.block_id.hex()
    flip(data_file(path), offset)
    assert main(["verify", str(path), "--deep", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [problem["block_id"] for problem in found["problems"]] == [name]
    with Store.open(path) as store:
        assert restored(store.namespace(plain_layout()), SESSION) == 16
        assert store.stats().bad_blocks == 1


def test_evict(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`evict` removes a namespace by its id, or everything, and says what went."""
    infos = {info["model"]: info for info in run_json(capsys, "ls", path)}
    gone = run_json(capsys, "evict", path, "--namespace", infos["plain"]["namespace_id"][:12])
    assert gone["tokens"] == 201
    with Store.open(path) as store:
        assert store.namespace(plain_layout()).match(SESSION) is None
        assert restored(store.namespace(hybrid_layout(), salt=b"tenant"), SESSION) == 100
    assert run_json(capsys, "evict", path, "--all")["tokens"] == 100
    with Store.open(path) as store:
        assert store.stats().blocks == 0
        assert store.verify().ok


def test_evict_by_size_takes_the_oldest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`evict --bytes` frees at least that much, the least recently used first."""
    gone = run_json(capsys, "evict", path, "--bytes", "1K")
    assert gone["freed_bytes"] >= 1024
    with Store.open(path) as store:
        assert store.namespace(plain_layout()).match(SESSION) is None
        assert restored(store.namespace(plain_layout()), OTHER) == 101


def test_errors_have_a_status_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be opened is a line on standard error and status 2; nothing is created."""
    assert main(["stats", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "max_bytes" in captured.err
    assert not (tmp_path / "nowhere").exists()


def test_unknown_namespace_is_an_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A namespace prefix that names none evicts nothing and has status 2."""
    assert main(["evict", str(path), "--namespace", "zz"]) == 2
    assert "0 namespaces" in capsys.readouterr().err
    with Store.open(path) as store:
        assert restored(store.namespace(plain_layout()), SESSION) == 100


def test_runs_as_a_module(path: Path) -> None:
    """`python -m kvstore` is the command."""
    done = subprocess.run([sys.executable, "-m", "kvstore", "ls", str(path), "--json"], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 2


def test_resize(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`resize` changes the cap, for people and as JSON; a refusal is one line and status 2, and changes nothing."""
    assert main(["resize", str(path), "8MiB"]) == 0
    out = capsys.readouterr().out
    assert "16.0 MiB before, 8.0 MiB now" in out
    assert run_json(capsys, "resize", path, "32M")["max_bytes"] == 32 << 20
    assert main(["resize", str(path), "12"]) == 2
    assert "at least" in capsys.readouterr().err
    with Store.open(path) as store:
        assert main(["resize", str(path), "8MiB"]) == 2
        assert "more than this handle" in capsys.readouterr().err
        assert store.max_bytes == 32 << 20
        assert restored(store.namespace(plain_layout()), SESSION) == 100


def test_repair(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`repair` says that there is nothing to repair, or what was kept and where the damaged file is; a dry run has status 1."""
    assert run_json(capsys, "repair", path)["ok"] is True
    assert main(["repair", str(path)]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    with data_file(path).open("r+b") as file:
        file.write(bytes(2 * 32768))
    assert main(["repair", str(path), "--dry-run"]) == 1
    assert "3 would be kept, 0 would be lost" in capsys.readouterr().out
    assert main(["stats", str(path)]) == 2
    found = run_json(capsys, "repair", path)
    assert (found["sessions_kept"], found["sessions_lost"], found["max_bytes"]) == (3, 0, CAP)
    assert data_file(found["moved_to"]).exists()
    assert run_json(capsys, "verify", path, "--deep")["ok"] is True
    data_file(path).write_bytes(bytes(100))
    assert main(["repair", str(path)]) == 2
    assert "--max-bytes" in capsys.readouterr().err
    assert main(["repair", str(path), "--max-bytes", "16MiB"]) == 0
    assert "moved to" in capsys.readouterr().out
