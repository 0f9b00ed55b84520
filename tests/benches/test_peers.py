"""The comparison with other stores: its processes, what becomes of one that fails, and what is reported of one that isn't there."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benches.harness import Outcome
from benches.peers import registry, setup
from benches.peers.llama_state import Blob
from benches.peers.measure import Compared, Plan, Side, compare
from benches.peers.processes import PeerFailed, PeerProcess
from benches.peers.report import report
from benches.peers.shape import Session, Shape, wrong_bytes

ROOT = Path(__file__).parents[2]
SHAPE = Shape(2, 64)
PLAN = Plan(SHAPE, tokens=320, base=64, turn=32, rounds=1, threads=2, patience=60)
NUMPY = next(peer for peer in registry.PEERS if peer.name == "numpy.load")
READY = 'import json, os, sys, time\nprint(json.dumps({"event": "ready"}), flush=True)\nsys.stdin.readline()\n'


def script(code: str, patience: float = 60) -> PeerProcess:
    """A process that says it is ready, takes one request, and does something with it."""
    return PeerProcess([sys.executable, "-c", READY + code], "the script", patience)


def test_rows_follow_from_seeds_alone() -> None:
    """Two sessions that begin alike have the same tokens and rows up to there, and others behind; a wrong byte is counted."""
    a, b = Session(((1, 70), (2, 100))), Session(((1, 70), (3, 100)))
    assert np.flatnonzero(a.tokens() != b.tokens())[0] == 70
    left, right = SHAPE.arrays(100), SHAPE.arrays(100)
    a.fill(SHAPE, left)
    b.fill(SHAPE, right)
    assert all(np.array_equal(x[:70], y[:70]) and not np.array_equal(x[70], y[70]) for x, y in zip(left, right, strict=True))
    assert left[1][69].tobytes() == a.row(SHAPE, 1, 69)
    again = SHAPE.arrays(100)
    a.fill(SHAPE, again, start=65)
    assert all(np.array_equal(x[65:], y[65:]) for x, y in zip(left, again, strict=True))
    assert wrong_bytes(SHAPE, a, left, 100) == 0
    left[2][33, 5] ^= 1
    assert wrong_bytes(SHAPE, a, left, 100) == 1
    assert wrong_bytes(SHAPE, a, left, 33) == 0


@pytest.mark.parametrize("peer", [registry.KVSTORE, NUMPY], ids=lambda peer: peer.driver)
def test_what_is_saved_is_had_in_a_new_process(peer: registry.Peer, tmp_path: Path) -> None:
    """A driver's save, then its restore in another process: every byte, and of a prompt what it shares."""
    stored, prompt = Session(((1, 250), (2, 320))), Session(((1, 250), (9, 320)))
    with registry.start(peer, SHAPE, 2, 60, 320) as child:
        child.ask("open", directory=str(tmp_path / "x"), tokens=320)
        child.ask("make", parts=stored.parts)
        saved = child.ask("save", parts=stored.parts)
        assert saved["seconds"] > 0
        assert max(saved["calls"], saved["storage"]) >= 320 * SHAPE.token_bytes
    with registry.start(peer, SHAPE, 2, 60, 320) as child:
        child.ask("open", directory=str(tmp_path / "x"), tokens=320)
        assert child.ask("check", parts=stored.parts) == {"length": 320, "wrong": 0}
        assert child.ask("check", parts=prompt.parts) == {"length": 250, "wrong": 0}
        assert child.ask("restore", parts=prompt.parts)["length"] == 250


def test_drivers_of_others_import_nothing_of_kvstore() -> None:
    """A peer's process has none of this project's library in it, so nothing of it can help or hinder the peer."""
    code = (
        "import sys, benches.peers.child, benches.peers.drivers.numpy_file, benches.peers.llama_state\n"
        "sys.exit(any(m.partition('.')[0] == 'kvstore' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_peer_that_dies_is_reported() -> None:
    """A process that crashes is a PeerFailed with its exit code and its last words."""
    with (
        pytest.raises(PeerFailed, match=r"the script died \(exit code 7\)\nlast words"),
        script('print("last words", file=sys.stderr, flush=True); os._exit(7)') as child,
    ):
        child.ask("save")


def test_peer_that_reports_an_error_is_reported() -> None:
    """What a driver raises comes out as a PeerFailed that names what was asked."""
    with pytest.raises(PeerFailed, match="none failed in start: ModuleNotFoundError"):
        registry.start(registry.Peer("none", "", "nothing", (), "", own_python=True), SHAPE, 1, 60, 1).__enter__()


def test_peer_that_talks_nonsense_is_reported() -> None:
    """A line that is not the protocol is a PeerFailed, not a crash of the runner."""
    with pytest.raises(PeerFailed, match="not the protocol"), script('print("hello", flush=True); time.sleep(60)') as child:
        child.ask("save")


def test_peer_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Past the time limit the whole process group is killed: a server that the peer has started too."""
    note = tmp_path / "pid"
    code = (
        "import subprocess\n"
        'server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
        f"open({str(note)!r} + '.tmp', 'w').write(str(server.pid)); os.rename({str(note)!r} + '.tmp', {str(note)!r})\n"
        "time.sleep(600)"
    )
    child = script(code, patience=60)
    with pytest.raises(PeerFailed, match="did not answer to save within 0 s"), child:
        assert child._process.stdin is not None
        child._process.stdin.write(b"{}\n")
        child._process.stdin.flush()
        deadline = time.monotonic() + 60
        while not note.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.patience = 0
        child.ask("save")
    assert _gone(int(note.read_text()))


def _gone(pid: int) -> bool:
    """Whether a process ends within a while (it is reaped by whoever adopts it)."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_comparison_of_two_real_stores(tmp_path: Path) -> None:
    """Everything is measured of both sides; the store that checks notices the flipped byte, the one that doesn't hands it out."""
    compared = Compared(NUMPY)
    compare(NUMPY, PLAN, tmp_path, lambda line: None, compared)
    for side in (compared.theirs, compared.ours):
        for name in ("save", "save_durable", "turn", "turn_durable", "turn_bytes", "cold", "first", "warm", "shared"):
            assert len(getattr(side, name)) == PLAN.rounds, name
        assert side.found == "all 320 tokens, right"
        assert side.shared_tokens == PLAN.shared
        assert side.disk > 320 * SHAPE.token_bytes
    assert compared.theirs.flipped == "1 wrong bytes in silence, 320 tokens"
    assert not compared.theirs.noticed
    assert compared.ours.noticed
    assert compared.ours.flipped.endswith("of 320 tokens, right") or compared.ours.flipped == "nothing"
    outcome = Outcome()
    report([("", PLAN, [compared])], outcome)
    json.dumps([asdict(table) for table in outcome.tables] + [asdict(plot) for plot in outcome.plots] + [outcome.figures])
    assert all(len(row) == len(table.columns) for table in outcome.tables for row in table.rows)
    assert all(any("times kvstore" in column or "of 1" in column for column in table.columns) for table in outcome.tables)
    compared_tables = [table for table in outcome.tables if table.title != "Where kvstore is not ahead"]
    assert [row[0] for table in compared_tables for row in table.rows] == ["kvstore", "numpy.load"] * len(compared_tables)
    (plot,) = outcome.plots
    assert plot.groups == ("kvstore", "numpy.load")
    assert len(outcome.targets) == 6


def test_where_kvstore_is_not_ahead_the_report_says_so() -> None:
    """A peer that takes less time or less room has "no" in its row, a missed target, and a row with the reason."""
    faster, slower = Side(warm=[0.5], warm_own=[0.5], disk=90, flipped="x"), Side(warm=[1.0], warm_own=[1.0], disk=100, flipped="y")
    outcome = Outcome()
    report([("", PLAN, [Compared(NUMPY, theirs=faster, ours=slower)])], outcome)
    tables = {table.title: table for table in outcome.tables}
    assert tables["Warm restore"].rows[-1][-1] == "no"
    assert [(row[0], row[3]) for row in tables["Where kvstore is not ahead"].rows] == [
        ("warm restore", 0.5),
        ("bytes on disk with a shared prefix", 0.9),
    ]
    assert all(row[4] for row in tables["Where kvstore is not ahead"].rows)
    assert [target.met for target in outcome.targets] == [False, False]
    outcome = Outcome()
    report([("", PLAN, [Compared(NUMPY, theirs=slower, ours=faster)])], outcome)
    assert all(target.met for target in outcome.targets)
    assert "Where kvstore is not ahead" not in [table.title for table in outcome.tables]


def test_peer_that_fails_at_once_is_one_line() -> None:
    """Where nothing was measured of a peer, its line says why and nothing else."""
    outcome = Outcome()
    report([("", PLAN, [Compared(NUMPY, failure="it died (SIGSEGV)")])], outcome)
    assert [line.split() for line in outcome.lines] == [["numpy.load", "FAILED:", "it", "died", "(SIGSEGV)"]]


def test_peer_that_fails_keeps_what_was_measured(tmp_path: Path) -> None:
    """One that breaks down half-way is in the report with its reason, and with what it had done until then."""
    compared = Compared(NUMPY)

    def break_it(line: str) -> None:
        if "conversation" in line:
            (tmp_path / "peer-turns").write_text("in the way")

    with pytest.raises(PeerFailed, match=r"numpy\.load failed in open") as caught:
        compare(NUMPY, PLAN, tmp_path, break_it, compared)
    compared.failure = str(caught.value)
    outcome = Outcome()
    report([("", PLAN, [compared])], outcome)
    settings = outcome.tables[-1]
    assert "failed in open" in str(settings.rows[-1])
    assert any("Cold restore" in table.title and table.rows[-1][0] == "numpy.load" for table in outcome.tables)
    assert "FAILED" in outcome.lines[0]


def test_missing_peers_are_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, one that was not finished, one in which a peer could not be installed: each is said, with the command."""
    peer = next(peer for peer in registry.PEERS if peer.driver == "nixl")
    monkeypatch.setenv(registry.ENVIRONMENT, str(tmp_path))
    assert "make bench-peers" in registry.missing(peer)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert "has not finished" in registry.missing(peer)
    (tmp_path / "peers.json").write_text(json.dumps({"nixl-cu12": "no matching distribution"}))
    assert registry.missing(peer) == "not installed: nixl-cu12: no matching distribution"
    (tmp_path / "peers.json").write_text(json.dumps({"nixl-cu12": ""}))
    assert registry.missing(peer) == ""
    assert registry.missing(NUMPY) == ""
    absent = Compared(peer, failure="not installed: nixl-cu12: no matching distribution", installed=False)
    outcome = Outcome()
    report([("", PLAN, [absent])], outcome)
    assert "no matching distribution" in str(outcome.tables[-1].rows[-1])
    assert "no matching distribution" in outcome.lines[0]


def test_every_registered_peer_can_be_set_up() -> None:
    """Each package that a peer is reported by is installed by a step, and each driver is a file."""
    known = {step.package for step in setup.STEPS}
    for peer in (*registry.PEERS, *registry.LLAMA_PEERS):
        assert (ROOT / "benches" / "peers" / "drivers" / f"{peer.driver}.py").is_file()
        assert peer.own_python or set(peer.packages) <= known


def test_setup_writes_down_why_something_cannot_be_had(tmp_path: Path) -> None:
    """A step that fails is no failure of the whole; its reason is kept for the report, and it is tried again the next time."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    fake.chmod(0o755)
    assert setup.main([str(tmp_path), "--only", "diskcache"]) == 0
    assert json.loads((tmp_path / "peers.json").read_text()) == {"diskcache": "ERROR: No matching distribution found"}
    fake.write_text("#!/bin/sh\nexit 0\n")
    assert setup.main([str(tmp_path), "--only", "diskcache"]) == 0
    assert json.loads((tmp_path / "peers.json").read_text()) == {"diskcache": ""}


def test_interrupt_keeps_results_and_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C in the middle: status 130, the results until then, no scratch and no process of a peer's left."""
    mark = f"{registry.ENVIRONMENT}={tmp_path}"
    command = [sys.executable, "-m", "benches", "run", "peers", "--size", "smallest", "--dir", str(tmp_path / "s")]
    process = subprocess.Popen(
        [*command, "--results", str(tmp_path / "r")],
        cwd=ROOT,
        env={**os.environ, registry.ENVIRONMENT: str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob("s/scratch-*/peers/peer/kvstore-*")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    (path,) = (tmp_path / "r").glob("peers-*.json")
    assert any("interrupted after" in doubt for doubt in json.loads(path.read_text())["doubts"])
    assert not list((tmp_path / "s").iterdir())
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _environment(pid) and not _gone(int(pid))]


def _environment(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("flags", [struct.pack("<II", 0, 2), struct.pack("<IIII", 0, 2, 1, 0)])
def test_blob_of_a_sequence_is_built_from_rows_and_taken_apart(flags: bytes) -> None:
    """Of one token it is the sample that it was learned from; of more, the rows come back."""
    shape = Shape(1, 32)
    rows = [np.arange(i, i + 32, dtype=np.uint8)[None] for i in range(2)]
    head = struct.pack("<IiIIiIi", 0xAF143CD8, 0, 1, 1, 0, 1, 0)
    sample = head + flags + b"".join(struct.pack("<iQ", 1, 32) + row.tobytes() for row in rows)
    blob = Blob(shape, np.frombuffer(sample, np.uint8))
    assert blob.build(rows, 1).tobytes() == sample
    many = [np.arange(i, i + 320, dtype=np.int32).astype(np.uint8).reshape(10, 32) for i in range(2)]
    back = shape.arrays(10)
    blob.take(blob.build(many, 10), back, 10)
    assert all(np.array_equal(a, b) for a, b in zip(many, back, strict=True))
    with pytest.raises(ValueError, match="not of the kind"):
        Blob(Shape(1, 64), np.frombuffer(sample, np.uint8))


@pytest.mark.model
@pytest.mark.parametrize("peer", [registry.KVSTORE_LLAMA, registry.LLAMA_PEERS[0]], ids=lambda peer: peer.driver)
def test_contexts_of_the_real_model_are_saved_and_restored(peer: registry.Peer, tmp_path: Path) -> None:
    """A session's rows are put into a context, saved from it, and restored into it, byte for byte."""
    shape, stored, prompt = Shape(30, 384), Session(((1, 100), (2, 150))), Session(((1, 100), (3, 150)))
    with registry.start(peer, shape, 2, 60, 150) as child:
        child.ask("open", directory=str(tmp_path / "x"), tokens=150)
        child.ask("make", parts=stored.parts)
        child.ask("save", parts=stored.parts)
        assert child.ask("check", parts=stored.parts) == {"length": 150, "wrong": 0}
        assert child.ask("check", parts=prompt.parts) == {"length": 100, "wrong": 0}
