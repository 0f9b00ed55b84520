"""Whether a run shows what it is to show: every reason why it does not, in words."""

from __future__ import annotations

from benches.demo.run import Control, Run, Turn, differing

__all__ = ["failures"]


def _turn(turn: Turn) -> list[str]:
    name = f"{turn.story.name}, turn {turn.number}"
    wrong = []
    if turn.number == 1 and not turn.found:
        wrong.append(f"{name}: the uninterrupted run misses the needle {turn.needle!r} and says {turn.reference['text']!r}")
    if turn.promoted and turn.served["reused"] != turn.expected_reuse:
        wrong.append(f"{name}: promote reused {turn.served['reused']} tokens, {turn.expected_reuse} were stored")
    return wrong + _unequal(name, turn.served, turn.reference)


def _unequal(name: str, served: dict[str, object], reference: dict[str, object]) -> list[str]:
    wrong = []
    if served["answer"] != reference["answer"]:
        wrong.append(f"{name}: the answer is {served['text']!r}, without interruption {reference['text']!r}")
    if parts := differing(served, reference):
        wrong.append(f"{name}: the state differs from the uninterrupted one in {', '.join(parts)}")
    if served["logits"] != reference["logits"]:
        wrong.append(f"{name}: the first token's logits differ from the uninterrupted ones")
    return wrong


def _control(control: Control) -> list[str]:
    wrong = []
    stats = control.served["stats"]
    if control.served["reused"] > control.damage.position:
        wrong.append(
            f"negative control: promote reused {control.served['reused']} tokens, across the block that was damaged at "
            f"{control.damage.position}"
        )
    if not stats["fallbacks"]:
        wrong.append("negative control: the tier counted no fallback")
    if not control.served["log"]:
        wrong.append("negative control: the refusal was not logged")
    if control.served["answer"] != control.turn.reference["answer"]:
        wrong.append(f"negative control: the answer is not the uninterrupted one but {control.served['text']!r}")
    return wrong + _unequal("negative control", control.served, control.reference)


def failures(run: Run) -> list[str]:
    """List every reason why the run does not show what it is to show; an empty list is success."""
    wrong = [reason for turn in run.turns for reason in _turn(turn)]
    for number, stats in enumerate(run.tiers, 1):
        if stats["differing_blocks"]:
            wrong.append(f"server {number}: {stats['differing_blocks']} shared blocks differ from what was computed again")
    if not sum(stats["shared_blocks_checked"] for stats in run.tiers):
        wrong.append("no shared block was compared with what was computed again")
    return wrong + _control(run.control)
