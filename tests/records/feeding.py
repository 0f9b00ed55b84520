"""Feeding everything that reads bytes from a disk or an engine with bytes that nobody wrote. Run in a child of bounded memory."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore import KVStoreError
from kvstore.adapters.llamacpp.frame import Cells, Frame, fit
from kvstore.adapters.llamacpp.learn import learn
from kvstore.errors import IndexDamaged
from kvstore.records.block import Ref
from kvstore.records.columns import RefColumns
from tests.llamacpp.blobs import blob

from .examples import BLOCK, DECODERS, ENCODED, summed_again

__all__ = ["TARGETS", "bound_memory", "feed", "feed_lengths"]

_BLOBS = {
    f"blob {version}{' transposed' * transposed}": blob(range(3), version=version, transposed=transposed)
    for version in (3, 4)
    for transposed in (False, True)
}


def _columns(raw: bytes) -> object:
    """Decode a reference record among many; it has to be taken where it is by itself, and only there."""
    columns = RefColumns.decode([BLOCK] * 3, [ENCODED["ref"], raw, None])
    try:
        Ref.decode(BLOCK, raw)
        whole = True
    except IndexDamaged:
        whole = False
    assert columns.whole.tolist() == [True, whole, False]
    return columns


def _blob(raw: bytes) -> object:
    """Learn a blob; what is learned has to describe it to the last byte."""
    made = np.frombuffer(raw, np.uint8)
    geometry = learn(made, 1)
    rows = int.from_bytes(raw[12:16], "little")
    assert fit(geometry, rows, int(geometry.recurrent is not None), made.size).nbytes == made.size
    return geometry


def _framed(name: str) -> Callable[[bytes], object]:
    frame = Frame(learn(_BLOBS[name], 1), Cells(3, None, None))

    def check(raw: bytes) -> object:
        made = np.frombuffer(raw, np.uint8).copy()
        frame.check(made, 1, 3, at=3)
        return {stream: rows.nbytes for stream, rows in frame.streams(made).items()}

    return check


# what is fed -> the reader, and bytes that it takes
TARGETS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    **{name: (decode, ENCODED[name]) for name, decode in DECODERS.items()},
    "references at once": (_columns, ENCODED["ref"]),
    **{name: (_blob, made.tobytes()) for name, made in _BLOBS.items()},
    **{f"frame of {name}": (_framed(name), made.tobytes()) for name, made in _BLOBS.items()},
}
_HUGE = [(1 << bits) - less for bits in (16, 31, 32, 40, 63, 64) for less in (0, 1)]
_JSON = [
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 5000,
    b"[]",
    b"{}",
    b'"\\ud800"',
    b"true",
    b"[" * 5000,
    b"4611686018427387904",
    b'"f16"',
]


def bound_memory(more: int) -> None:
    """Let this process map at most so many bytes more than it has now: what allocates from a wrong length fails."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def _sum(name: str, raw: bytes) -> bytes:
    known = "ref" if name == "references at once" else name
    return summed_again(known, raw) if known in DECODERS and len(raw) >= 4 else raw


def _put(raw: bytearray, at: int, number: int, width: int) -> None:
    raw[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def _mutate(chance: random.Random, raw: bytearray) -> None:
    """Change bytes in one of the ways in which memory, disks and wrong lengths change them."""
    at = chance.randrange(len(raw) + 1)
    match chance.randrange(7):
        case 0:
            raw[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
        case 1 if at < len(raw):
            raw[at] ^= 1 << chance.randrange(8)
        case 2:
            del raw[at : at + chance.randrange(1, 64)]
        case 3:
            raw[at:at] = raw[: chance.randrange(64)]
        case 4:
            width = chance.choice([1, 2, 4, 8])
            _put(raw, at, chance.choice(_HUGE), width)
        case 5:
            raw[at : at + 512] = bytes(min(512, len(raw) - at))
        case _:
            other = chance.choice(list(ENCODED.values()))
            raw[at:] = other[chance.randrange(len(other)) :]


def _mutate_json(chance: random.Random, raw: bytes) -> bytes:
    """Put something else in the place of a value of a layout's encoding."""
    ends = [place for place, byte in enumerate(raw) if byte in b":,[]{}"]
    first, last = sorted(chance.sample(range(len(ends)), 2))
    last = chance.choice([last, min(first + 1, len(ends) - 1)])
    return raw[: ends[first] + 1] + chance.choice(_JSON) + raw[ends[last] :]


def _inputs(chance: random.Random, name: str, raw: bytes) -> Iterator[bytes]:
    while True:
        if chance.random() < 0.3:
            yield _sum(name, chance.randbytes(chance.randrange(400)))
        if name == "layout" and chance.random() < 0.5:
            yield _mutate_json(chance, raw)
        changed = bytearray(raw)
        for _ in range(chance.randrange(1, 5)):
            _mutate(chance, changed)
        yield _sum(name, bytes(changed)) if chance.random() < 0.6 else bytes(changed)


def _read(name: str, raw: bytes, outcomes: Counter[str]) -> None:
    try:
        value = TARGETS[name][0](raw)
    except KVStoreError as error:
        assert str(error)
        outcomes[type(error).__name__] += 1
    except BaseException:
        print(f"{name} was fed {raw.hex()}", flush=True)
        raise
    else:
        assert value is not None
        outcomes["a value"] += 1


def feed(seed: int, count: int) -> Counter[str]:
    """Feed `count` inputs, each reader its share; return how they ended. Only named errors and values are ends."""
    outcomes: Counter[str] = Counter()
    sources = {name: _inputs(random.Random(f"{seed} {name}"), name, raw) for name, (_, raw) in TARGETS.items()}
    for number in range(count):
        name = list(sources)[number % len(sources)]
        _read(name, next(sources[name]), outcomes)
    return outcomes


def feed_lengths() -> Counter[str]:
    """Put a huge number at every place of every record, in every width: whatever is a length there, is tried."""
    outcomes: Counter[str] = Counter()
    for name, (_, raw) in TARGETS.items():
        for at in range(len(raw) if len(raw) < 512 else 200):
            for width in (2, 4, 8):
                for number in _HUGE:
                    changed = bytearray(raw)
                    _put(changed, at, number, width)
                    if number < 1 << 8 * width:
                        _read(name, _sum(name, bytes(changed)), outcomes)
    return outcomes
