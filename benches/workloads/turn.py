"""turn: what a turn of a long conversation writes to the file system, against the bytes that are new."""

from __future__ import annotations

from dataclasses import dataclass

from benches import pagecache
from benches.harness import Bench, Context, Needs, Outcome, Size, Table, Target
from benches.sessions import TOKEN_BYTES, arrays_for, large_layout, random_tokens
from benches.written import written
from kvstore import Store

__all__ = ["BENCH"]

_RATIO, _SLACK = 1.05, 256 << 10
# (tokens of the session, turns, tokens of a turn)
_SIZES: dict[Size, tuple[int, int, int]] = {
    "full": (100_000, 10, 512),
    "quick": (20_000, 4, 512),
    "smallest": (1000, 2, 100),
}
# then turns of other lengths, so that tails of other sizes are met; of one of 512 that begins and ends with an awkward tail
_OTHER_TURNS = (516, 512, 37, 1000, 256, 300, 7)
# at last some turns with the file in the cache, where the kernel counts more than is written
_CACHED_TURNS = 3


def _needs(size: Size) -> Needs:
    tokens, turns, each = _SIZES[size]
    total = (tokens + turns * each + sum(_OTHER_TURNS) + _CACHED_TURNS * each) * TOKEN_BYTES
    return Needs(disk=2 * total + (256 << 20), memory=total + (512 << 20))


@dataclass(frozen=True, slots=True)
class _Turn:
    dropped: bool
    base: int
    tokens: int
    new_bytes: int
    tail_bytes: int
    written: int
    handed: int
    seconds: float

    @property
    def excess(self) -> float:
        """What was written, over the limit's own terms: at most 1.05 meets the target."""
        return (self.written - _SLACK) / (self.new_bytes + self.tail_bytes)

    def record(self) -> dict[str, float]:
        return {
            "dropped_before": self.dropped,
            "base": self.base,
            "tokens": self.tokens,
            "new_bytes": self.new_bytes,
            "tail_bytes": self.tail_bytes,
            "written_bytes": self.written,
            "write_call_bytes": self.handed,
            "seconds": self.seconds,
            "ratio": self.written / (self.new_bytes + self.tail_bytes),
            "ratio_less_slack": self.excess,
        }


def _run(context: Context) -> Outcome:
    tokens, count, each = _SIZES[context.size]
    layout = large_layout()
    size = layout.block_tokens
    lengths = [(True, each)] * count + [(True, n) for n in _OTHER_TURNS] + [(False, each)] * _CACHED_TURNS
    total = tokens + sum(length for _, length in lengths)
    prompt = random_tokens(7, total)
    context.say(f"making {total * TOKEN_BYTES / 1e9:.2f} GB of rows")
    arrays = arrays_for(layout, total)
    outcome = context.outcome
    turns: list[_Turn] = []
    path = context.scratch / "store"
    with Store.open(path, max_bytes=2 * total * TOKEN_BYTES + (256 << 20)) as store:
        context.say(f"saving the first {tokens} tokens")
        store.namespace(layout).save(prompt[:tokens], {name: a[:tokens] for name, a in arrays.items()})
    base, stayed = tokens, 0.0
    for dropped, length in lengths:
        if dropped:
            stayed = max(stayed, pagecache.drop(path / "data.mdb"))
        with Store.open(path) as store:
            namespace = store.namespace(layout)
            start = base - base % size
            stop = base + length
            rows = {name: a[start:stop] for name, a in arrays.items()}
            before = written()
            saved = namespace.save(prompt[:stop], rows, start=start)
            after = written()
        tail = (base - start) * TOKEN_BYTES
        storage, handed = after[0] - before[0], after[1] - before[1]
        turns.append(_Turn(dropped, base, length, length * TOKEN_BYTES, tail, storage, handed, saved.seconds))
        base = stop
    if stayed > 0.01:
        outcome.doubts.append(f"{100 * stayed:.0f}% of the file stayed in the page cache: the kernel counts too much")
    with Store.open(path) as store, store.namespace(layout).lease(prompt) as lease:
        if lease.length != total:
            raise AssertionError(f"{lease.length} of {total} tokens can be restored after the turns")
        lease.validate()
    of_target, others, cached = turns[:count], turns[count : count + len(_OTHER_TURNS)], turns[count + len(_OTHER_TURNS) :]
    alike = [t for t in turns if t.dropped and t.tokens == each]
    worst = max(alike, key=lambda t: t.excess)
    outcome.figures = {
        "token_bytes": TOKEN_BYTES,
        "block_tokens": size,
        "session_tokens": tokens,
        "turns": [t.record() for t in of_target],
        "other_turns": [t.record() for t in others],
        "cached_turns": [t.record() for t in cached],
    }
    for turn in turns:
        ratio = turn.written / (turn.new_bytes + turn.tail_bytes)
        outcome.lines.append(
            f"{turn.base:>7} +{turn.tokens:<5} new {turn.new_bytes / 2**20:6.2f} MiB, tail {turn.tail_bytes / 2**20:5.2f}, "
            f"written {turn.written / 2**20:6.2f} (calls {turn.handed / 2**20:6.2f}): ratio {ratio:.3f}, "
            f"less {_SLACK >> 10} KiB {turn.excess:.3f}; {turn.seconds * 1e3:.0f} ms"
            + ("" if turn.dropped else "; file in the cache")
        )
    outcome.tables = [
        Table(
            f"Turns of a session of {tokens:,} tokens",
            (
                "at",
                "turn",
                "page cache",
                "new, MiB",
                "rewritten tail, MiB",
                "written, MiB",
                "ratio to new and tail",
                f"ratio less {_SLACK >> 10} KiB",
                "ms",
            ),
            tuple(
                (
                    f"{turn.base:,}",
                    f"+{turn.tokens}",
                    "dropped before" if turn.dropped else "has the file",
                    turn.new_bytes / 2**20,
                    turn.tail_bytes / 2**20,
                    turn.written / 2**20,
                    turn.written / (turn.new_bytes + turn.tail_bytes),
                    turn.excess,
                    turn.seconds * 1e3,
                )
                for turn in turns
            ),
            "Where the page cache has the file, the kernel counts a whole cached folio of up to 2 MiB where a part of it is "
            "rewritten; the device's own counter does not.",
        )
    ]
    outcome.targets = [Target(f"worst turn of +{each}: (written - {_SLACK >> 10} KiB) / (new + tail)", worst.excess, _RATIO)]
    return outcome


_METHOD = """\
A session of 100,000 tokens of 16 KiB is saved; then come turns, each saved in a store opened anew: ten of 512 tokens, then
others, so that tails of all sizes are met. What a save causes to be written is the kernel's own count for the process
(`write_bytes` of `/proc/self/io`), with the file dropped from the page cache beforehand: otherwise the kernel counts too much, as
the last turns show. The limit is the rows that are new and those of the tail (of the block in which the last turn ended), which
is rewritten; 256 KiB are allowed for the index. At the end all of it is restored and checked."""

BENCH = Bench(
    "turn", "what a turn of +512 tokens writes after 100,000, at 16 KiB a token, against the new bytes", _needs, _run, _METHOD
)
