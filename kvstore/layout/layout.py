"""The layout of a session's state: its streams and states in one configuration of one model, and its fingerprint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore import ids
from kvstore.errors import LayoutError
from kvstore.layout.parts import State, Stream

__all__ = ["LAYOUT_VERSION", "SEGMENT_ALIGN", "Layout"]

LAYOUT_VERSION = 1  # on disk
SEGMENT_ALIGN = 64  # on disk: each stream's segment of a payload starts at a multiple of this many bytes
_TARGET_BLOCK_BYTES = 4 << 20
_MIN_BLOCK_TOKENS, _MAX_BLOCK_TOKENS = 16, 512


def _align(offset: int) -> int:
    return -(-offset // SEGMENT_ALIGN) * SEGMENT_ALIGN


@dataclass(frozen=True)
class Layout:
    """What a session's state consists of, for one model in one configuration. Immutable and hashable.

    Everything here is identity: sessions of two layouts that differ in anything share nothing. Put in whatever changes
    the bytes (weights, revision, engine build, KV format, position encoding); leave out what doesn't (context size,
    ports, device ordinals, time).

    Attributes
    ----------
    streams : tuple of Stream
        In the order in which they lie in a block; put the first layer's first, since it is restored first.
    states : tuple of State
        Arrays that are valid at one exact position. A layout with states is restored at checkpoints only.
    model : str
        The model's name, for people. Identity as well.
    identity : tuple of (str, str or int) pairs
        What else names the model in this configuration; given as a mapping, kept sorted by key.
    shard : tuple of (int, int)
        (rank, of): which part of the model's state this process holds.
    block_tokens : int
        Positions in a block. By default the largest power of two from 16 to 512 whose block is at most 4 MiB, raised to
        a multiple of every `tokens_per_row`.

    Raises
    ------
    LayoutError
        When two parts have one name, when there is no part at all, or when `block_tokens` does not divide into rows.
    """

    streams: tuple[Stream, ...]
    states: tuple[State, ...] = ()
    model: str = ""
    identity: Mapping[str, str | int] | tuple[tuple[str, str | int], ...] = ()
    shard: tuple[int, int] = (0, 1)
    block_tokens: int = 0
    canonical: bytes = field(init=False, repr=False, compare=False)
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    _segments: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "streams", _parts("streams", self.streams, Stream))
        put(self, "states", _parts("states", self.states, State))
        names = [stream.name for stream in self.streams] + [state.name for state in self.states]
        if not names:
            raise LayoutError("a layout needs at least one stream or state")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise LayoutError(f"names must be unique among streams and states, got {twice} more than once")
        if not isinstance(self.model, str):
            raise LayoutError(f"model must be a string, got {self.model!r}")
        put(self, "identity", _identity(self.identity))
        put(self, "shard", _shard(self.shard))
        put(self, "block_tokens", self._block_tokens())
        put(self, "canonical", self._encode())
        put(self, "fingerprint", ids.fingerprint(self.canonical))

    def _block_tokens(self) -> int:
        step = math.lcm(*(s.tokens_per_row for s in self.streams)) if self.streams else 1
        tokens = self.block_tokens
        if tokens:
            if not isinstance(tokens, int) or not 1 <= tokens <= 65536 or tokens % step:
                raise LayoutError(
                    f"block_tokens must be 1 to 65536 and a multiple of every tokens_per_row (here {step}), got {tokens!r}"
                )
            return tokens
        tokens = _MAX_BLOCK_TOKENS
        while tokens > _MIN_BLOCK_TOKENS and self.payload_bytes(tokens) > _TARGET_BLOCK_BYTES:
            tokens //= 2
        return math.lcm(tokens, step)

    def _encode(self) -> bytes:
        """Encode canonically: JSON with sorted keys, no spaces, ASCII, integers and strings only (docs/format.md)."""
        assert isinstance(self.identity, tuple)
        record: dict[str, Any] = {
            "block_tokens": self.block_tokens,
            "identity": [[key, value] for key, value in self.identity],
            "model": self.model,
            "shard": list(self.shard),
            "states": [{"bounded": list(s.bounded), "dtype": s.dtype, "name": s.name, "shape": list(s.shape)} for s in self.states],
            "streams": [
                {
                    "dtype": s.dtype,
                    "name": s.name,
                    "row_shape": list(s.row_shape),
                    "token_axis": s.token_axis,
                    "tokens_per_row": s.tokens_per_row,
                }
                for s in self.streams
            ],
            "version": LAYOUT_VERSION,
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @classmethod
    def decode(cls, canonical: bytes) -> Layout:
        """Rebuild a layout from its canonical encoding.

        Raises
        ------
        LayoutError
            When the bytes are no canonical layout, or one of a version or with parts that this code does not know.
        """
        try:
            record = json.loads(canonical)
            if record.get("version") != LAYOUT_VERSION:
                raise LayoutError(
                    f"layout of version {record.get('version')!r}, this code reads version {LAYOUT_VERSION}; upgrade kvstore"
                )
            layout = cls(
                streams=tuple(Stream(**{**s, "row_shape": tuple(s["row_shape"])}) for s in record["streams"]),
                states=tuple(State(**{**s, "shape": tuple(s["shape"]), "bounded": tuple(s["bounded"])}) for s in record["states"]),
                model=record["model"],
                identity=tuple((key, value) for key, value in record["identity"]),
                shard=tuple(record["shard"]),
                block_tokens=record["block_tokens"],
            )
        except LayoutError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutError(f"not the canonical encoding of a layout: {error}") from error
        if layout.canonical != canonical:
            raise LayoutError("the encoding of a layout is not canonical, or has parts that this code does not know")
        return layout

    @property
    def token_bytes(self) -> float:
        """Bytes that one token adds to all streams together (a mean, where rows stand for several tokens)."""
        return sum(s.row_bytes / s.tokens_per_row for s in self.streams)

    @property
    def states_bytes(self) -> int:
        """The most bytes that the states of one checkpoint take together."""
        return sum(s.max_bytes for s in self.states)

    def segments(self, tokens: int) -> tuple[int, ...]:
        """Offsets in a payload of `tokens` positions at which the streams' segments start, and then its length.

        Segment i holds `streams[i].rows(tokens)` rows as a contiguous array of shape `streams[i].array_shape(tokens)`.
        """
        known = self._segments.get(tokens)
        if known is not None:
            return known
        offsets = [0]
        for stream in self.streams:
            offsets.append(_align(offsets[-1] + stream.rows(tokens) * stream.row_bytes))
        if tokens <= _MAX_BLOCK_TOKENS:  # asked for once a block: at most so many answers are kept
            self._segments[tokens] = tuple(offsets)
        return tuple(offsets)

    def payload_bytes(self, tokens: int) -> int:
        """Bytes of the payload of a block of `tokens` positions."""
        return self.segments(tokens)[-1]


def _parts(kind: str, parts: Iterable[Any], of: type) -> tuple[Any, ...]:
    try:
        checked = tuple(parts)
    except TypeError:
        checked = (parts,)
    if any(not isinstance(part, of) for part in checked):
        raise LayoutError(f"{kind} must be {of.__name__} objects, got {checked!r}")
    if len(checked) > 4096:
        raise LayoutError(f"at most 4096 {kind}, got {len(checked)}")
    return checked


def _identity(identity: Mapping[str, str | int] | Iterable[tuple[str, str | int]]) -> tuple[tuple[str, str | int], ...]:
    pairs = list(identity.items() if isinstance(identity, Mapping) else identity)
    for key, value in pairs:
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, (str, int)):
            raise LayoutError(f"identity maps strings to strings or integers, got {key!r}: {value!r}")
    if len({key for key, _ in pairs}) != len(pairs):
        raise LayoutError("identity has a key more than once")
    return tuple(sorted(pairs))


def _shard(shard: tuple[int, int]) -> tuple[int, int]:
    if len(shard) != 2 or not all(isinstance(n, int) for n in shard) or not 0 <= shard[0] < shard[1]:
        raise LayoutError(f"shard is (rank, of) with 0 <= rank < of, got {shard!r}")
    return (shard[0], shard[1])
