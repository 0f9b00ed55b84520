"""The demo's short form, and that it can fail."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches.demo import __main__ as demo
from benches.demo.prompts import SHORTEST
from benches.demo.run import Run
from benches.demo.run import run as carry_out
from benches.demo.text import STORIES, Fact
from benches.demo.verdict import failures

pytestmark = pytest.mark.model

USERS = STORIES[:2]  # two are enough to share a beginning and to alternate


@dataclasses.dataclass
class Short:
    """The short run: what it returned, what it found, what it left."""

    code: int
    found: Run
    out: Path


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Short:
    """Run the demo once, as short as it gets."""
    out = tmp_path_factory.mktemp("demo")
    kept: list[Run] = []

    def keep(*arguments: Any) -> Run:
        kept.append(carry_out(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "run", keep)
        code = demo.main(["--length", str(SHORTEST), "--out", str(out)], USERS)
    return Short(code, kept[0], out)


def test_the_short_form_says_equal(short: Short) -> None:
    """Every turn of the short run is bit-equal to the uninterrupted one, and the exit code says so."""
    record = json.loads((short.out / "result.json").read_text())
    assert (short.code, record["ok"], record["failures"]) == (0, True, [])
    assert [(row["prompt"], row["turn"]) for row in record["rows"]] == [(s.name, n) for n in (1, 2, 3, 4) for s in USERS]
    for row in record["rows"]:
        assert row["answer_equal"] and row["state_equal"] and row["logits_equal"], row
        assert row["read"] + row["reused"] == row["tokens"]
        assert (row["reused"] > SHORTEST * 3 // 4) == (row["turn"] > 1)
    assert all(row["needle_found"] for row in record["rows"] if row["turn"] == 1)


def test_the_control_is_refused(short: Short) -> None:
    """The promote of the damaged block is refused, logged and counted, and the answer is the uninterrupted one."""
    control = json.loads((short.out / "result.json").read_text())["control"]
    assert control["fallbacks"] == 1
    assert any("refuses damaged bytes" in line for line in control["log"])
    assert control["reused"] <= control["position"] < control["reused_undamaged"]
    assert control["answer_equal"] and control["state_equal"] and control["logits_equal"]


def test_shared_tokens_are_stored_once(short: Short) -> None:
    """The store takes little more than the distinct rows, and less than separate snapshots would."""
    figures = json.loads((short.out / "result.json").read_text())["figures"]
    assert figures["differing_blocks"] == 0 < figures["shared_blocks_checked"]
    assert figures["distinct_bytes"] <= figures["stored_bytes"] < figures["separate_bytes"]


def test_nothing_but_the_results_is_left(short: Short) -> None:
    """The store is removed; the JSON and the chart stay."""
    assert sorted(path.name for path in short.out.iterdir()) == ["result.json", "ttft.png"]
    assert (short.out / "ttft.png").read_bytes().startswith(b"\x89PNG")


def _wrong_answer(run: Run) -> None:
    run.turns[3].served["answer"][0] += 1


def _wrong_logits(run: Run) -> None:
    run.turns[4].reference["logits"] = "0" * 32


def _wrong_state(run: Run) -> None:
    run.turns[7].reference["state"]["parts"][7][1] = "0" * 16


def _missed(run: Run) -> None:
    run.turns[0].reference["text"] = " something else"


def _less_reused(run: Run) -> None:
    run.turns[2].served["reused"] -= 1


def _differing(run: Run) -> None:
    run.tiers[1]["differing_blocks"] = 1


def _unchecked(run: Run) -> None:
    for stats in run.tiers:
        stats["shared_blocks_checked"] = 0


def _accepted(run: Run) -> None:
    run.control.served["reused"] = run.control.turn.served["reused"]
    run.control.served["stats"]["fallbacks"] = 0


def _silent(run: Run) -> None:
    run.control.served["log"] = []


def _control_answer(run: Run) -> None:
    run.control.served["answer"] = [0]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_wrong_answer, "observatory, turn 2: the answer is"),
        (_wrong_logits, "lighthouse, turn 3: the first token's logits differ"),
        (_wrong_state, "observatory, turn 4: the state differs from the uninterrupted one in v.3"),
        (_missed, "lighthouse, turn 1: the uninterrupted run misses the needle"),
        (_less_reused, "lighthouse, turn 2: promote reused"),
        (_differing, "server 2: 1 shared blocks differ"),
        (_unchecked, "no shared block was compared"),
        (_accepted, "negative control: promote reused"),
        (_silent, "negative control: the refusal was not logged"),
        (_control_answer, "negative control: the answer is not the uninterrupted one"),
    ],
)
def test_every_fault_is_a_failure(short: Short, spoil: Callable[[Run], None], says: str) -> None:
    """A run in which one thing is not as it must be is a failure that names it."""
    run = copy.deepcopy(short.found)
    assert failures(run) == []
    spoil(run)
    assert any(reason.startswith(says) for reason in failures(run)), failures(run)


def test_a_failure_is_an_exit_code(short: Short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run whose needle is missed exits with 1 and says which, in the output and in the JSON."""
    run = copy.deepcopy(short.found)
    story = run.turns[0].story
    run.turns[0].story = dataclasses.replace(story, facts=(Fact(story.facts[0].words, "golden teaspoon"), *story.facts[1:]))
    monkeypatch.setattr(demo, "run", lambda *_: run)
    assert demo.main(["--length", str(SHORTEST), "--out", str(tmp_path)]) == 1
    assert "misses the needle 'golden teaspoon'" in capsys.readouterr().out
    assert not json.loads((tmp_path / "result.json").read_text())["ok"]


def test_a_dying_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """When a server process fails, the demo exits with 1, gives its reason, and leaves no scratch files."""
    monkeypatch.setattr("benches.demo.run._CAP", 4096)
    assert demo.main(["--length", str(SHORTEST), "--out", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "could not be carried out" in output
    assert "CapError" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", ["0", "599", "9000", "many"])
def test_impossible_lengths_are_refused(length: str, capsys: Any) -> None:
    """A length that the texts or the model cannot have is refused with the range."""
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--length", length])
    assert "--length" in capsys.readouterr().err
