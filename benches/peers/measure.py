"""One peer against kvstore: the same sessions, in turns, each side in processes of its own."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benches import pagecache
from benches.peers.driver import files_of
from benches.peers.processes import PeerFailed, PeerProcess
from benches.peers.registry import KVSTORE, KVSTORE_LLAMA, Peer, start
from benches.peers.shape import Session, Shape

__all__ = ["Compared", "Plan", "Side", "compare", "ratios"]

_NEEDLE = 48  # bytes of a row by which its place in a file is found
_LARGE = 1 << 20  # bytes of a file from which on it matters whether it stays in the page cache
_TURN = 10  # the turn whose save is measured, and then as many more as there are rounds


@dataclass(frozen=True, slots=True)
class Plan:
    """How large the comparison is.

    Attributes
    ----------
    shape : Shape
    tokens : int
        Of a session.
    base, turn : int
        Tokens that a conversation begins with, and that it grows by.
    rounds : int
        Pairs of each measurement.
    threads : int
    patience : float
        Seconds that a process may take for an answer.
    """

    shape: Shape
    tokens: int
    base: int
    turn: int
    rounds: int
    threads: int
    patience: float

    @property
    def shared(self) -> int:
        """Tokens that the three sessions share, and a prompt with them: 9 of 10, at no boundary of anything."""
        return self.tokens * 9 // 10 + 1

    def session(self, own: int) -> Session:
        """One of the sessions that begin alike."""
        return Session(((1, self.shared), (own, self.tokens)))

    def conversation(self, turn: int) -> Session:
        """The conversation after a turn."""
        return Session(((50, self.base + turn * self.turn),))

    @property
    def turns(self) -> int:
        """Turns of the conversation."""
        return _TURN + self.rounds - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest session of all."""
        return max(self.tokens, self.base + self.turns * self.turn)

    @property
    def session_bytes(self) -> int:
        """Of one session."""
        return self.tokens * self.shape.token_bytes


@dataclass(slots=True)
class Side:
    """What was measured of one side. All lists have an entry a round; seconds, and bytes.

    Attributes
    ----------
    save, save_durable : list of float
        A first session: until the call returns, and until the files are synced too.
    save_aside : list of float
        Of `save`, what went into gathering rows.
    turn, turn_durable, turn_bytes : list
        The same of a turn's save, with the bytes that it wrote.
    cold, cold_own, first, first_own, warm, warm_own, shared, shared_own : list of float
        A restore into the engine's arrays, and of it what the peer itself took: after the files were dropped from the page cache;
        with them in it, the first after opening, and the next; of a prompt that shares 9 of 10 tokens.
    processor : dict of str to list of float
        Processor seconds of all threads by what was done; they hold on a busy machine too.
    shared_tokens : int
        How many tokens of that prompt came.
    disk : int
        Bytes on disk of three sessions.
    found, flipped : str
        What a new process found, and what a flipped byte led to.
    stayed : float
        The largest share of the files that stayed in the page cache when they were dropped.
    notes : list of str
    """

    save: list[float] = field(default_factory=list)
    save_aside: list[float] = field(default_factory=list)
    save_durable: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    turn_durable: list[float] = field(default_factory=list)
    turn_bytes: list[int] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    cold_own: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    first_own: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    warm_own: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    shared_own: list[float] = field(default_factory=list)
    processor: dict[str, list[float]] = field(default_factory=dict)
    shared_tokens: int = 0
    disk: int = 0
    found: str = ""
    flipped: str = ""
    noticed: bool = False
    stayed: float = 0.0
    version: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Compared:
    """A peer, and kvstore beside it.

    Attributes
    ----------
    peer : Peer
    theirs, ours : Side
    failure : str
        Why it could not be measured, or not to the end; empty when it was.
    installed : bool
    """

    peer: Peer
    theirs: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)
    failure: str = ""
    installed: bool = True


class _Runner:
    def __init__(self, peer: Peer, side: Side, plan: Plan, directory: Path, name: str) -> None:
        self.peer, self.side, self.plan, self.directory, self.name = peer, side, plan, directory, name
        self.stored = directory / f"{name}-sessions"
        self.child: PeerProcess | None = None

    @contextmanager
    def process(self) -> Iterator[_Runner]:
        """A new process, until the block is left."""
        with start(self.peer, self.plan.shape, self.plan.threads, self.plan.patience, self.plan.longest) as child:
            self.child = child
            self.side.version = child.hello["version"]
            try:
                yield self
            finally:
                self.child = None

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        assert self.child is not None
        return self.child.ask(op, **arguments)

    @property
    def reopens(self) -> bool:
        assert self.child is not None
        return bool(self.child.hello["reopens"])

    def open(self, path: Path) -> None:
        self.ask("open", directory=str(path), tokens=self.plan.longest)

    def make(self, session: Session, start: int = 0) -> None:
        self.ask("make", parts=session.parts, start=start)

    def save(self, session: Session) -> dict[str, Any]:
        return self.ask("save", parts=session.parts)

    def store_once(self) -> None:
        """Save the first session in a directory of its own, and remove it."""
        path = self.directory / f"{self.name}-once"
        self.open(path)
        self._note_save(self.save(self.plan.session(2)))
        self.ask("close")
        shutil.rmtree(path)

    def store_all(self) -> None:
        """Save three sessions that begin alike, in the directory that restores are made from."""
        self.open(self.stored)
        for own in (2, 3, 4):
            session = self.plan.session(own)
            self.make(session, 0 if own == 2 else self.plan.shared)
            saved = self.save(session)
            if own == 2:
                self._note_save(saved)

    def weigh(self) -> None:
        """Note what the three sessions take."""
        self.side.disk = sum(512 * path.stat().st_blocks for path in files_of(self.stored))

    def _note_save(self, saved: dict[str, Any]) -> None:
        self.side.save.append(saved["seconds"])
        self.side.save_aside.append(saved["aside"])
        self._note_processor("save", saved)
        self.side.save_durable.append(saved["seconds"] + saved["settled"] + saved["synced"])

    def _note_processor(self, what: str, done: dict[str, Any]) -> None:
        self.side.processor.setdefault(what, []).append(done["processor"])

    def drop(self) -> None:
        """Drop all files from the page cache, with nothing of them mapped where the peer can be closed."""
        if self.reopens:
            self.ask("close")
        for path in files_of(self.stored):
            stayed = pagecache.drop(path) if path.stat().st_size else 0.0
            if path.stat().st_size >= _LARGE:
                self.side.stayed = max(self.side.stayed, stayed)
        if self.reopens:
            self.open(self.stored)

    def warm_up(self) -> None:
        """Bring all files into the page cache, and open them anew.

        They are dropped before: what is read around pages that are there already comes in smaller ones, which cost more to map.
        """
        if self.reopens:
            self.ask("close")
        for path in files_of(self.stored):
            if path.stat().st_size:
                pagecache.drop(path)
            with path.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass
        if self.reopens:
            self.open(self.stored)

    def restore(self, session: Session, what: str) -> int:
        done = self.ask("restore", parts=session.parts)
        getattr(self.side, what).append(done["seconds"])
        getattr(self.side, f"{what}_own").append(done["seconds"] - done["aside"])
        self._note_processor(what, done)
        return int(done["length"])

    def cold(self) -> None:
        self.drop()
        self._whole(self.restore(self.plan.session(2), "cold"))

    def warm(self) -> None:
        self.warm_up()
        self._whole(self.restore(self.plan.session(2), "first"))
        self._whole(self.restore(self.plan.session(2), "warm"))

    def share(self) -> None:
        self.side.shared_tokens = self.restore(self.plan.session(9), "shared")

    def _whole(self, length: int) -> None:
        if length < self.plan.tokens - 256:  # a peer of whole chunks leaves out the rest
            raise PeerFailed(f"{self.peer.name} restored {length} tokens of {self.plan.tokens}")

    def turn(self, number: int) -> None:
        """Save a turn of the conversation; it counts from the tenth on."""
        before = self.plan.conversation(number - 1).length if number > 1 else 0
        self.make(self.plan.conversation(number), before)
        saved = self.save(self.plan.conversation(number))
        if number >= _TURN:
            self.side.turn.append(saved["seconds"])
            self._note_processor("turn", saved)
            self.side.turn_durable.append(saved["seconds"] + saved["settled"] + saved["synced"])
            # what goes around write calls (AIO, io_uring, maps) is seen only in the other count
            self.side.turn_bytes.append(max(saved["calls"], saved["storage"]))


def _in_turns(place: int, first: Callable[[], object], second: Callable[[], object]) -> None:
    for work in (first, second) if place % 2 == 0 else (second, first):
        work()


def compare(peer: Peer, plan: Plan, directory: Path, say: Callable[[str], None], compared: Compared) -> None:
    """Measure a peer beside kvstore; what was measured stays in `compared` when it fails.

    Raises
    ------
    PeerFailed
        When a process crashes, reports an error or hangs.
    """
    plan = replace(plan, rounds=min(plan.rounds, peer.rounds))
    them = _Runner(peer, compared.theirs, plan, directory, "peer")
    us = _Runner(KVSTORE if peer.group == "arrays" else KVSTORE_LLAMA, compared.ours, plan, directory, "kvstore")
    say(f"{peer.name}: saving {plan.session_bytes / 1e6:.0f} MB, {plan.rounds} pairs")
    _store(us, them)
    say(f"{peer.name}: restoring in a new process, {plan.rounds} pairs")
    _restore(us, them)
    for side in (us, them):
        _flip(side)
        shutil.rmtree(side.stored, ignore_errors=True)
    say(f"{peer.name}: a conversation of {plan.turns} turns")
    with us.process(), them.process():
        for side in (us, them):
            side.open(directory / f"{side.name}-turns")
        for number in range(1, plan.turns + 1):
            # the default binds this round's number, which mypy can't infer for a lambda
            _in_turns(number, lambda n=number: us.turn(n), lambda n=number: them.turn(n))  # type: ignore[misc]


def _store(us: _Runner, them: _Runner) -> None:
    with us.process(), ExitStack() as stack:
        us.make(us.plan.session(2))
        running = False
        for place in range(us.plan.rounds - 1):
            if not running:
                stack.enter_context(them.process())
                them.make(us.plan.session(2))
                running = them.reopens
            _in_turns(place, us.store_once, them.store_once)
            if not running:
                stack.close()
        if not running:
            stack.enter_context(them.process())
        _in_turns(us.plan.rounds - 1, us.store_all, them.store_all)
    us.weigh()
    them.weigh()


def _restore(us: _Runner, them: _Runner) -> None:
    with us.process(), ExitStack() as stack:
        stack.enter_context(them.process())
        for side in (us, them):
            side.open(side.stored)
            side.side.found = _verdict(side, side.ask("check", parts=side.plan.session(2).parts))
            if side.side.found.startswith("nothing") and side is them:
                # what it knows ends with its process: restores are of the process that saved
                stack.close()
                shutil.rmtree(side.stored)
                stack.enter_context(them.process())
                side.store_all()
                side.side.notes.append("restored by the process that had saved")
        for place in range(us.plan.rounds):
            _in_turns(place, us.cold, them.cold)
            _in_turns(place, us.warm, them.warm)
            _in_turns(place, us.share, them.share)
        if them.side.found.startswith("nothing"):
            _damage(them)
            them.side.flipped = _verdict(them, them.ask("check", parts=them.plan.session(2).parts))


def _verdict(side: _Runner, checked: dict[str, Any]) -> str:
    """What a check's answer means, in words."""
    if "error" in checked:
        side.side.noticed = True
        return f"an error: {checked['error']}"
    length, wrong = checked["length"], checked["wrong"]
    if wrong:
        return f"{wrong} wrong bytes in silence, {length} tokens"
    if not length:
        side.side.noticed = True
        return "nothing"
    if length >= side.plan.tokens - 256:
        return f"all {length} tokens, right"
    side.side.noticed = True
    return f"{length} of {side.plan.tokens} tokens, right"


def _flip(side: _Runner) -> None:
    """Change one byte in the middle of a stored session, and restore it in a new process."""
    if side.side.flipped:
        return
    if not _damage(side):
        side.side.flipped = "its bytes do not lie in its files as they are"
        return
    side.side.noticed = False
    with side.process():
        side.open(side.stored)
        side.side.flipped = _verdict(side, side.ask("check", parts=side.plan.session(2).parts))


def _damage(side: _Runner) -> int:
    """Change one byte of the row in the middle of a session, wherever it lies; return at how many places."""
    plan = side.plan
    needle = plan.session(2).row(plan.shape, plan.shape.streams // 2, plan.tokens // 2)[:_NEEDLE]
    places = 0
    for path in files_of(side.stored):
        if path.stat().st_size < len(needle):
            continue
        with path.open("r+b", buffering=0) as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                found = list(_finds(view, needle))
            for at in found:
                os.pwrite(file.fileno(), bytes([needle[0] ^ 1]), at)
            os.fsync(file.fileno())
            places += len(found)
    return places


def _finds(view: mmap.mmap, needle: bytes) -> Iterator[int]:
    at = view.find(needle)
    while at >= 0:
        yield at
        at = view.find(needle, at + 1)


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """How many times kvstore's time a peer took, round by round."""
    return [t / o for t, o in zip(theirs, ours, strict=False)]
