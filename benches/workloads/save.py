"""save: a long new session, durably, against plain writes of the same bytes, and against LMDB alone."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import blake3
import lmdb
import numpy as np

from benches.harness import Bench, Context, Needs, Outcome, Plot, Size, Table, Target, median, quantile
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, Array, arrays_for, bytes_of, large_layout, pieces, random_tokens
from kvstore import Layout, Store
from kvstore.env.pages import write_empty

__all__ = ["BENCH"]

_VALUE = 4 << 20
_SYNCED = 2 * _VALUE  # plain writes are waited for so often
_PIECE = 4 * _VALUE  # and LMDB alone so often: as the store
_PAGE = 32 << 10
# The sides take turns part by part: what else the machine does then meets all of them alike.
_PARTS = 4
# (tokens, rounds)
_SIZES: dict[Size, tuple[int, int]] = {"full": (100_000, 7), "quick": (20_000, 7), "smallest": (4096, 2)}
_LIMIT = 0.7
_LIMIT_MIB = 256


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=5 * total + (512 << 20), memory=2 * total + (1 << 30))


@dataclass(frozen=True, slots=True)
class _Session:
    """What every side writes: the same bytes, cut where each can take them.

    `values` are those bytes in equal pieces of a block's size; `parts` says how many of them each turn takes.
    """

    layout: Layout
    prompt: Array
    arrays: dict[str, Array]
    values: list[memoryview]
    cap: int

    @property
    def total(self) -> int:
        return bytes_of(self.arrays)

    def positions(self, part: int) -> tuple[int, int]:
        """The positions of a part, on block boundaries."""
        size, tokens = self.layout.block_tokens, self.prompt.size
        step = -(-tokens // _PARTS // size) * size
        return min(part * step, tokens), min((part + 1) * step, tokens)

    def groups(self, part: int, together: int) -> Iterator[Sequence[memoryview]]:
        """The values of a part, some `together` bytes at a time."""
        start, stop = (position * TOKEN_BYTES // _VALUE for position in self.positions(part))
        stop = len(self.values) if part == _PARTS - 1 else stop
        for first in range(start, stop, together // _VALUE):
            yield self.values[first : min(first + together // _VALUE, stop)]


class _Side(Protocol):
    """One way of writing a session, part by part; made anew for each round."""

    @property
    def file(self) -> Path:
        """The file that it writes."""

    def part(self, number: int) -> None:
        """Write a part, durably: this is what is timed."""

    def close(self) -> None:
        """End it; what it wrote is removed by the caller."""


class _Plain:
    """Buffered writes, and fdatasync now and then."""

    def __init__(self, directory: Path, session: _Session) -> None:
        self.file, self._session = directory / "plain", session
        self._fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def part(self, number: int) -> None:
        for group in self._session.groups(number, _SYNCED):
            for value in group:
                if os.write(self._fd, value) != len(value):
                    raise AssertionError("a short write")
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _Bare:
    """LMDB with the store's options and page size, and nothing above it: no index, no sums, no hash.

    With `metasync` each commit waits for its meta page as well, as LMDB does by itself; without, only the last of a part.
    """

    def __init__(self, directory: Path, session: _Session, *, metasync: bool) -> None:
        self.file, self._session = directory / "data.mdb", session
        write_empty(str(self.file), page_bytes=_PAGE, map_bytes=session.cap // _PAGE * _PAGE)
        self._environment = lmdb.open(
            str(directory), map_size=0, max_dbs=4, max_spare_txns=0, meminit=False, create=False, metasync=metasync
        )
        self._db = self._environment.open_db(b"blocks")
        self._next = 0

    def part(self, number: int) -> None:
        for group in self._session.groups(number, _PIECE):
            with self._environment.begin(write=True, buffers=True) as txn:
                for value in group:
                    self._next += 1
                    txn.put(self._next.to_bytes(32, "big"), value, db=self._db)
        self._environment.sync(True)

    def close(self) -> None:
        self._environment.close()


class _Stored:
    """The store. Each part is a save that extends the last one's session."""

    def __init__(self, directory: Path, session: _Session) -> None:
        self.file, self._session = directory / "data.mdb", session
        self._store = Store.open(directory, max_bytes=session.cap)
        self._namespace = self._store.namespace(session.layout)

    def part(self, number: int) -> None:
        start, stop = self._session.positions(number)
        arrays = {name: array[start:stop] for name, array in self._session.arrays.items()}
        saved = self._namespace.save(self._session.prompt[:stop], arrays, start=start)
        if saved.new_tokens != stop - start:
            raise AssertionError(f"saved {saved}")

    def close(self) -> None:
        self._store.close()


_SIDES: dict[str, Callable[[Path, _Session], _Side]] = {
    "plain": _Plain,
    "lmdb": lambda directory, session: _Bare(directory, session, metasync=True),
    "lmdb_deferred": lambda directory, session: _Bare(directory, session, metasync=False),
    "kvstore": _Stored,
}


def _session(context: Context, tokens: int) -> _Session:
    layout = large_layout()
    context.say(f"making {tokens * TOKEN_BYTES / 1e9:.2f} GB of rows")
    arrays = arrays_for(layout, tokens)
    values = [piece[0] if len(piece) == 1 else memoryview(b"".join(piece)) for piece in pieces(arrays, _VALUE)]
    return _Session(layout, random_tokens(3, tokens), arrays, values, 2 * tokens * TOKEN_BYTES + (256 << 20))


def _forget(side: _Side) -> None:
    """Drop what the page cache has of a side's file: the next side then finds memory that was in use a moment ago.

    Fresh memory can cost a virtual machine ten times as much as the write that wants it, and whoever comes first would pay.
    """
    with side.file.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _round(directory: Path, session: _Session, place: int) -> tuple[dict[str, list[float]], float]:
    """Each side's seconds, part by part, and the processor time of the store's."""
    sides: dict[str, _Side] = {}
    seconds: dict[str, list[float]] = {name: [] for name in _SIDES}
    processor = 0.0
    try:
        for name, make in _SIDES.items():
            (directory / name).mkdir()
            sides[name] = make(directory / name, session)
        for part in range(_PARTS):
            for name in _SIDES if (place + part) % 2 == 0 else reversed(list(_SIDES)):
                gc.collect()
                os.sync()  # nothing of another side is left to be written
                before, start = time.process_time(), time.perf_counter()
                sides[name].part(part)
                seconds[name].append(time.perf_counter() - start)
                if name == "kvstore":
                    processor += time.process_time() - before
                _forget(sides[name])
    finally:
        for name, side in sides.items():
            side.close()
            shutil.rmtree(directory / name)
    return seconds, processor


def _hash_alone(session: _Session) -> float:
    start = time.perf_counter()
    for value in session.values:
        blake3.blake3(value).digest()
    return time.perf_counter() - start


def _memory(directory: Path, session: _Session) -> float:
    """MiB that a save takes at most above the caller's arrays; not timed, since watching costs time."""
    (directory / "watched").mkdir()
    with closing(_Stored(directory / "watched", session)) as side, Watch() as watch:
        for part in range(_PARTS):
            side.part(part)
    shutil.rmtree(directory / "watched")
    return watch.above_mib


def _run(context: Context) -> Outcome:
    tokens, rounds = _SIZES[context.size]
    session = _session(context, tokens)
    seconds: dict[str, list[list[float]]] = {name: [] for name in _SIDES}
    processor, hashed = [], []
    began = time.perf_counter()
    for place in range(rounds):
        parts, used = _round(context.scratch, session, place)
        for name in _SIDES:
            seconds[name].append(parts[name])
        processor.append(used)
        hashed.append(_hash_alone(session))
        context.note("save, by rounds", {name: [sum(taken) for taken in seconds[name]] for name in _SIDES})
        left = (time.perf_counter() - began) / (place + 1) * (rounds - place - 1)
        context.say(f"saving: {place + 1} of {rounds}" + (f", about {left:.0f} s left" if left >= 1 else ""))
    above = _memory(context.scratch, session)

    def ratios(name: str) -> list[float]:
        return [sum(p) / sum(k) for p, k in zip(seconds["plain"], seconds[name], strict=True)]

    def turns(name: str) -> list[float]:
        return list((np.array(seconds["plain"]) / np.array(seconds[name])).ravel())

    speeds = {name: session.total / median([sum(parts) for parts in seconds[name]]) / 1e9 for name in _SIDES}
    outcome = context.outcome
    outcome.figures = {
        "bytes": session.total,
        "rounds": rounds,
        "gb_s": speeds,
        "ratio": {name: median(ratios(name)) for name in _SIDES},
        "ratio_of_turns": {name: median(turns(name)) for name in _SIDES},
        "ratios": {name: ratios(name) for name in _SIDES},
        "kvstore_processor_seconds": median(processor),
        "hash_alone_seconds": median(hashed),
        "above_mib": above,
        "seconds": seconds,
    }
    says = {
        "plain": f"plain writes, fdatasync every {_SYNCED >> 20} MiB",
        "lmdb": "LMDB alone, each commit durable",
        "lmdb_deferred": f"LMDB alone, the last commit of {-(-session.total // _PARTS // _PIECE)} durable",
        "kvstore": "kvstore",
    }
    for name, what in says.items():
        low, high = min(ratios(name)), max(ratios(name))
        outcome.lines.append(
            f"{what}: {speeds[name]:.2f} GB/s, {median(ratios(name)):.3f} of plain (rounds {low:.2f} to {high:.2f}; "
            f"turn by turn {median(turns(name)):.3f})"
        )
    outcome.lines.append(
        f"kvstore takes {median(processor):.2f} s of processor time; hashing alone, one thread, {median(hashed):.2f} s; "
        f"{above:.1f} MiB above the caller's arrays"
    )
    outcome.tables = [
        Table(
            f"{session.total / 1e9:.2f} GB, durable",
            ("", "GB/s", "ratio to plain writes, by rounds", "ratio to plain writes, turn by turn", "p90 of a part, s"),
            tuple(
                (
                    what,
                    speeds[name],
                    median(ratios(name)),
                    median(turns(name)),
                    quantile([taken for parts in seconds[name] for taken in parts], 0.9),
                )
                for name, what in says.items()
            ),
            f"Of {rounds} rounds of {_PARTS} parts. kvstore takes {median(processor):.2f} s of processor time; "
            f"hashing alone, one thread, {median(hashed):.2f} s. Memory at most {above:.1f} MiB above the arrays.",
        )
    ]
    outcome.plots = [
        Plot(
            "rounds",
            "A durable save, round by round",
            "round",
            "GB/s",
            {
                what: [(place + 1, session.total / sum(parts) / 1e9) for place, parts in enumerate(seconds[name])]
                for name, what in says.items()
            },
        )
    ]
    outcome.targets = [
        Target("a durable save, of the speed of plain writes", median(ratios("kvstore")), _LIMIT, at_most=False),
        Target("MiB above the caller's arrays", above, _LIMIT_MIB),
    ]
    return outcome


_METHOD = """\
A new session of 100,000 tokens of 16 KiB is saved, and is on the disk when that returns. Against it: buffered writes of the same
bytes with fdatasync every 8 MiB; LMDB alone with the store's page size and the same pieces as values, where each commit waits for
its meta page, and where only the last does, as in the store. All sides take turns part by part (a quarter of the session each),
in reverse order every other time, so that what else the disk does meets them alike; before each part everything is synced, and
after it the page cache drops what was written. Ratios are of the rounds' sums, and turn by turn. Where the time goes is told in
[architecture.md](architecture.md#where-the-time-of-a-save-goes-measured)."""

BENCH = Bench(
    "save", "a new session of 1.6 GB, durable, against plain writes and fdatasync of the same bytes", _needs, _run, _METHOD
)
