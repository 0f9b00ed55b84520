"""The scenario: who asks what, in which process, and what is kept of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.markup import escape

from benches.demo.children import ServerProcess
from benches.demo.damage import Damage, flip_one_byte
from benches.demo.prompts import TURNS, first_prompt, shared_prefix
from benches.demo.text import Story
from kvstore import Store
from kvstore.layout import Layout, StateHash

__all__ = ["ANSWER", "Control", "Run", "Screen", "Turn", "run"]

ANSWER = 12  # tokens of an answer; the last of them is sampled and not evaluated
_ROOM = 512  # cells beyond the first prompt: three more turns and four answers
_CAP = 2 << 30


class Screen(Protocol):
    """Where the demo says what it does."""

    def say(self, text: str) -> None:
        """Print one line."""

    def reading(self, what: str) -> Any:
        """Show progress while a prompt is read: a context manager that gives a callable of (done, total)."""


@dataclass
class Turn:
    """One user's turn: what was asked, what the server answered, and what the reference says."""

    story: Story
    number: int
    tokens: list[int]
    served: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    cold: float = 0.0
    expected_reuse: int = 0

    @property
    def promoted(self) -> bool:
        """Whether the turn promoted; the first ones run cold."""
        return self.number > 1

    @property
    def evaluated(self) -> list[int]:
        """All tokens that the engine has evaluated when the turn is over."""
        return [*self.tokens, *self.served["answer"][:-1]]

    @property
    def needle(self) -> str:
        """What the model is to say."""
        return self.story.facts[self.number - 1].needle

    @property
    def found(self) -> bool:
        """Whether the uninterrupted run says it."""
        return self.needle in self.reference["text"]


@dataclass
class Control:
    """The negative control: the damaged block, and the turn that was asked again in a new process."""

    damage: Damage
    turn: Turn
    served: dict[str, Any]
    reference: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that a run of the scenario has found out."""

    length: int
    shared: int
    layout: Layout
    turns: list[Turn]
    control: Control
    store: dict[str, float]
    tiers: list[dict[str, float]]  # the counters of each server process, as they stood at its end
    seconds: dict[str, float] = field(default_factory=dict)


def differing(served: dict[str, Any], reference: dict[str, Any]) -> tuple[str, ...]:
    """Name the streams in which two whole states differ."""
    mine, theirs = (
        StateHash(e["state"]["length"], tuple((name, digest) for name, digest in e["state"]["parts"])) for e in (served, reference)
    )
    return mine.differing(theirs)


def _tokenizer(child: ServerProcess) -> Any:
    return lambda text: child.ask("tokenize", text=text)["ids"]


@contextmanager
def _process(screen: Screen, what: str, context: int, store: Path | None = None, cap: int | None = None) -> Iterator[ServerProcess]:
    with ServerProcess(context, store=store, max_bytes=cap) as child:
        screen.say(f"[bold]{what}[/bold] (process {child.pid})")
        yield child


def _serve(child: ServerProcess, screen: Screen, turn: Turn) -> None:
    with screen.reading(f"{turn.story.name}, turn {turn.number}: {len(turn.tokens)} tokens") as progress:
        turn.served = child.ask("serve", progress, tokens=turn.tokens, answer=ANSWER, promote=turn.promoted)
    how = f"reused {turn.served['reused']}, " if turn.promoted else ""
    screen.say(f"  {turn.story.name}, turn {turn.number}: {how}first token after {turn.served['ttft']:.2f} s:{_quote(turn.served)}")


def _quote(result: dict[str, Any]) -> str:
    return " " + escape(repr(result["text"].strip().split("\n")[0]))


def _next(turn: Turn, questions: dict[str, list[list[int]]]) -> Turn:
    """Append the answer and the next question, as token ids; nothing is tokenised again."""
    before = [*turn.tokens, *turn.served["answer"]]
    following = Turn(turn.story, turn.number + 1, [*before, *questions[turn.story.name][turn.number - 1]])
    following.expected_reuse = len(turn.evaluated)
    return following


def run(stories: Sequence[Story], length: int, store: Path, screen: Screen) -> Run:
    """Carry the scenario out, in one process after another.

    Parameters
    ----------
    stories : sequence of Story
        The users.
    length : int
        Tokens of the first prompts.
    store : path
        Where the store is created; the caller removes it.
    screen : Screen
        Where to say what is being done.
    """
    context = -(-(length + _ROOM) // 256) * 256
    turns: list[Turn] = []
    tiers: list[dict[str, float]] = []

    with _process(screen, "1. A server takes each prompt cold, answers, cascades, exits", context, store, _CAP) as child:
        layout = Layout.decode(child.layout.encode("ascii"))
        tokenize = _tokenizer(child)
        latest = [Turn(story, 1, first_prompt(story, length, tokenize)) for story in stories]
        questions = {s.name: [tokenize(s.ending(n)) for n in range(2, TURNS + 1)] for s in stories}
        shared = shared_prefix([turn.tokens for turn in latest])
        screen.say(f"  {len(latest)} prompts of about {length} tokens; the first {shared} are the same in all of them")
        for turn in latest:
            _serve(child, screen, turn)
            turn.cold = turn.served["ttft"]
        tiers.append(latest[-1].served["stats"])
    turns += latest

    rounds = [("2. A new server takes each prompt's next turn: it promotes from the store", 1)]
    rounds += [("3. A third server goes round robin over the three, for two more turns", 2)]
    for what, times in rounds:
        with _process(screen, what, context, store) as child:
            for _ in range(times):
                latest = [_next(turn, questions) for turn in latest]
                for turn in latest:
                    _serve(child, screen, turn)
                turns += latest
            tiers.append(latest[-1].served["stats"])

    stats = store_stats(store)
    control = _control(screen, context, store, layout, latest[0], shared)
    _reference(screen, context, turns, control)
    _cold(screen, context, turns)
    return Run(length, shared, layout, turns, control, stats, tiers)


def store_stats(path: Path) -> dict[str, float]:
    """Read the store's own numbers, and what its file takes on the disk."""
    with Store.open(path) as store:
        stats = store.stats()
        numbers = {name: float(getattr(stats, name)) for name in ("live_bytes", "payload_bytes", "file_bytes")}
    numbers["allocated_bytes"] = float(sum(512 * file.stat().st_blocks for file in path.rglob("*") if file.is_file()))
    return numbers


def _control(screen: Screen, context: int, store: Path, layout: Layout, turn: Turn, shared: int) -> Control:
    """Flip one byte of a block in the middle of a session's own part, and ask the same again in a new process."""
    damage = flip_one_byte(store, layout, turn.tokens, shared)
    screen.say(
        f"[bold]4. Negative control:[/bold] one byte of block {damage.index} of {damage.blocks} "
        f"(positions from {damage.position}) is flipped in the store's file"
    )
    with (
        _process(screen, "   A new server promotes from the damaged store", context, store) as child,
        screen.reading(f"{turn.story.name}, turn {turn.number} again") as progress,
    ):
        served = child.ask("serve", progress, tokens=turn.tokens, answer=ANSWER, promote=True)
    for line in served["log"]:
        screen.say(f"  [yellow]{escape(line)}[/yellow]")
    screen.say(f"  reused {served['reused']} of {turn.served['reused']} tokens, then:{_quote(served)}")
    return Control(damage, turn, served)


def _reference(screen: Screen, context: int, turns: Sequence[Turn], control: Control) -> None:
    """Let a live engine, with no store, be cut to the same positions and read the same tokens in the same batches."""
    with _process(screen, "5. The reference: a live engine, uninterrupted, without a store", context) as child:

        def resume(turn: Turn, position: int, what: str) -> dict[str, Any]:
            with screen.reading(what) as progress:
                return child.ask("resume", progress, tokens=turn.tokens, position=position, answer=ANSWER)

        for first in [turn for turn in turns if turn.number == 1]:
            for turn in [turn for turn in turns if turn.story is first.story]:
                position = turn.served["reused"] if turn.promoted else 0
                turn.reference = resume(turn, position, f"{turn.story.name}, turn {turn.number}")
                screen.say(f"  {turn.story.name}, turn {turn.number}:{_quote(turn.reference)}")
                if turn is control.turn:
                    control.reference = resume(turn, control.served["reused"], f"{turn.story.name}, after the control")


def _cold(screen: Screen, context: int, turns: Sequence[Turn]) -> None:
    """Measure what each later turn would have taken without promote."""
    with _process(screen, "6. The same turns cold: everything is read from position 0", context) as child:
        for turn in turns:
            if turn.promoted:
                with screen.reading(f"{turn.story.name}, turn {turn.number}: {len(turn.tokens)} tokens") as progress:
                    turn.cold = child.ask("cold", progress, tokens=turn.tokens)["ttft"]
                screen.say(f"  {turn.story.name}, turn {turn.number}: first token after {turn.cold:.2f} s")
