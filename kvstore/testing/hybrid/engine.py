"""The synthetic hybrid: a model with every kind of state there is, whose forward is a hash of all that it has read."""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvstore.errors import EngineError
from kvstore.ids import TokenArray, Tokens, as_tokens
from kvstore.layout import Layout, StateHash, state_hash
from kvstore.testing.expiring import STALE, Expiring, fill
from kvstore.testing.hybrid.layout import DRAFTER_WINDOW, KEY, POOL, RECURRENT_LAYERS, KVFormat, hybrid_layout
from kvstore.testing.sessions import Array
from kvstore.tier import Captured, Restored

__all__ = ["VOCABULARY", "SyntheticHybrid"]

VOCABULARY = 1000  # decoded ids are below it; the ids of images are not

_GDN_BYTES, _CONV_BYTES = 32, 8  # of one recurrent layer: its state; one position of its convolution history
_KEY_BYTES = 2 * KEY


class SyntheticHybrid:
    """One sequence of a made-up model of 48 layers; implements `kvstore.tier.Engine`.

    It keeps what the engines of such models keep:

    - 12 attention layers, K and V in int8 or packed 4 bits with scales, or in f16;
    - 36 recurrent layers: a state each, and the last 3 positions of a convolution;
    - an index over the attention rows: a pooled key for each 64 positions (`index.pooled`; the row behind the last one is the
      dead key, `index.dead`), the keys that aren't pooled yet (`index.tail`), a position for each pooled key
      (`index.block_pos`, which can't be computed from the row's number, as with M-RoPE);
    - the last 3 per-layer embeddings and the last token;
    - a drafter, one position behind the model since it reads the model's next token: its own K and V as **shifted rows** (row
      i is what the drafter computed for position i - 1, row 0 is zeros), and a ring of what it saw at the last 8 positions,
      with the place where the next one goes.

    Images enter as ids (`kvstore.ids.image_tokens`). A LoRA and a control vector change everything: they belong into the salt.

    The forward hashes every byte of all this, with the token. So one byte that is missing, stale, or of another session or
    position changes all later rows, states and tokens. It reads token by token: batches make no difference.

    Like `HashEngine` it is strict with whoever uses it: the arrays of a `capture` are overwritten at its next call.

    Parameters
    ----------
    kv : {"int8", "int4", "f16"}
        Format of attention K and V.
    lora, control : bytes
        What a LoRA and a control vector are told apart by.
    capacity : int
        Positions that the arrays have room for; identity, since it bounds a state.

    Attributes
    ----------
    position : int
        How many tokens the engine has read: its next token goes there.
    streams : dict of str to ndarray
        The engine's arrays: strided views of one buffer, position by position. Rows from `position` on hold whatever was
        there before.
    """

    def __init__(self, kv: KVFormat = "int8", *, lora: bytes = b"", control: bytes = b"", capacity: int = 4096) -> None:
        self._layout = hybrid_layout(kv, positions=capacity)
        self._capacity = capacity
        self.salt = b"".join(struct.pack("<Q", len(part)) + part for part in (lora, control))
        self._key = blake3(self._layout.fingerprint + self.salt).digest()
        each = [stream for stream in self._layout.streams if stream.tokens_per_row == 1]
        self._rows: npt.NDArray[np.uint8] = np.zeros((capacity, sum(s.row_bytes for s in each)), np.uint8)
        self.streams: dict[str, Array] = {}
        offset = 0
        for stream in each:
            rows = self._rows[:, offset : offset + stream.row_bytes].view(stream.view_dtype)
            shape = stream.array_shape(1)
            rows = rows.reshape(capacity, *shape[: stream.token_axis], *shape[stream.token_axis + 1 :])
            self.streams[stream.name] = np.moveaxis(rows, 0, stream.token_axis)
            offset += stream.row_bytes
        layers = len(RECURRENT_LAYERS)
        sizes = (offset, layers * _GDN_BYTES, layers * _CONV_BYTES, _KEY_BYTES, _KEY_BYTES, _KEY_BYTES, _KEY_BYTES, 4)
        self._ends = tuple(accumulate(sizes))  # of the pieces of what a token's hash is expanded to
        self._drafter = slice(offset - 2 * _KEY_BYTES, offset)
        self._pooled = np.zeros((capacity // POOL + 1, KEY), np.float16)  # with the dead key behind the last row
        self.streams["index.pooled"] = self._pooled
        self._handed_out = Expiring()
        self.reset()

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._layout

    def reset(self) -> None:
        """See `Engine.reset`. The rows keep their bytes, as those of a real engine do."""
        self._handed_out.expire()
        self.position = 0
        layers = len(RECURRENT_LAYERS)
        self._gdn: npt.NDArray[np.uint8] = np.zeros((layers, _GDN_BYTES), np.uint8)
        self._conv: npt.NDArray[np.uint8] = np.zeros((layers, 3, _CONV_BYTES), np.uint8)
        self._tail: npt.NDArray[np.uint8] = np.zeros((POOL - 1, _KEY_BYTES), np.uint8)
        self._block_pos: npt.NDArray[np.int32] = np.zeros(self._capacity // POOL, np.int32)
        self._ple: npt.NDArray[np.uint8] = np.zeros((3, _KEY_BYTES), np.uint8)
        self._last_token: npt.NDArray[np.uint32] = np.zeros(1, np.uint32)
        self._ring: npt.NDArray[np.uint8] = np.zeros((DRAFTER_WINDOW, _KEY_BYTES), np.uint8)
        self._ring_at: npt.NDArray[np.int32] = np.zeros(1, np.int32)
        self._pooled[0] = 0
        self._rows_seen = blake3()

    @property
    def states(self) -> dict[str, Array]:
        """The states at `position`: views, valid until the next call."""
        spans = self.position // POOL
        states: dict[str, Array] = {}
        for index, layer in enumerate(RECURRENT_LAYERS):
            states[f"gdn.{layer}.state"] = self._gdn[index].view("<f4").reshape(2, 4)
            states[f"gdn.{layer}.conv"] = self._conv[index].view("<f2").reshape(3, 4)
        states["index.tail"] = self._tail[: self.position % POOL].view("<f2")
        states["index.block_pos"] = self._block_pos[:spans]
        states["index.dead"] = self._pooled[spans]
        states["ple.history"] = self._ple.view("<f2")
        states["last_token"] = self._last_token
        states["drafter.ring"] = self._ring[: min(self.position, DRAFTER_WINDOW)].view("<f2")
        states["drafter.ring_at"] = self._ring_at
        return states

    def feed(self, tokens: Tokens) -> None:
        """Read tokens: what a real engine's prefill does."""
        self._handed_out.expire()
        for token in as_tokens(tokens).tolist():
            self._step(token)

    def decode(self, count: int, *, seed: int = 0) -> TokenArray:
        """Generate tokens and read each of them. Another seed is another answer, as with sampling."""
        self._handed_out.expire()
        if not self.position:
            raise EngineError("there is nothing to go on from; feed a prompt first")
        decoded = []
        for _ in range(count):
            token = int.from_bytes(self._hash(b"next %d" % seed).digest(length=8), "little") % VOCABULARY
            self._step(token)
            decoded.append(token)
        return np.array(decoded, np.uint32)

    def observe(self) -> bytes:
        """What the model would say next: a hash of every byte that it holds."""
        return self._hash(b"observe").digest()

    def capture(self, start: int, stop: int) -> Captured:
        """See `Engine.capture`."""
        self._handed_out.expire()
        if not 0 <= start < stop <= self.position or start % self._layout.block_tokens:
            raise EngineError(f"cannot capture [{start}, {stop}), the engine stands at {self.position}")
        streams: dict[str, Array] = {}
        for stream in self._layout.streams:
            span = slice(stream.rows(start), stream.rows(stop))
            streams[stream.name] = self.streams[stream.name][(slice(None),) * stream.token_axis + (span,)].copy()
        states = {name: state.copy() for name, state in self.states.items()} if stop == self.position else {}
        self._handed_out.hand_out(*streams.values(), *states.values())
        return Captured(streams, states)

    def apply(self, restored: Restored) -> None:
        """See `Engine.apply`. Raises EngineError when a state isn't one of the position that it comes with."""
        self._handed_out.expire()
        restored.copy_into(self.streams)
        states = restored.states()
        self.position = restored.length
        for name, state in self.states.items():  # those that there are at this position, to be written into
            if states[name].shape != state.shape:
                raise EngineError(f"{name} at position {self.position} has shape {state.shape}, got {states[name].shape}")
            state[...] = states[name]
        self._rows_seen = blake3(self._rows[: self.position].tobytes())

    def scribble(self) -> None:
        """Overwrite every array and state with noise, as another session would. Use `reset` or `apply` before the next token."""
        self._handed_out.expire()
        for array in (self._rows, self._pooled, self._gdn, self._conv, self._tail, self._block_pos, self._ple, self._ring):
            fill(array, STALE)
        self._last_token[0] = self._ring_at[0] = STALE
        self.position = 0

    def parts(self) -> dict[str, Array]:
        """Every stream and state, as `state_hash` takes them: views, valid until the next call."""
        return {**self.streams, **self.states}

    def state_hash(self) -> StateHash:
        """Hash everything that the engine holds at its position, part by part."""
        return state_hash(self._layout, self.parts(), self.position)

    def _hash(self, head: bytes) -> blake3:
        """Hash a few bytes and all that the engine holds."""
        spans = self.position // POOL
        seen = blake3(struct.pack("<Q", self.position) + head, key=self._key).update(self._rows_seen.digest())
        held: tuple[Array, ...] = (
            self._pooled[: spans + 1],
            self._gdn,
            self._conv,
            self._tail[: self.position % POOL],
            self._block_pos[:spans],
            self._ple,
            self._last_token,
            self._ring[: min(self.position, DRAFTER_WINDOW)],
            self._ring_at,
        )
        for array in held:
            seen.update(array.tobytes())
        return seen

    def _step(self, token: int) -> None:
        position = self.position
        if position == self._capacity:
            raise EngineError(f"the engine has room for {self._capacity} positions")
        layers = len(RECURRENT_LAYERS)
        raw = np.frombuffer(self._hash(b"token %d" % token).digest(length=self._ends[-1]), np.uint8)
        row, gdn, conv, key, dead, ple, ring, block = [raw[a:b] for a, b in pairwise((0, *self._ends))]
        self._rows[position] = row
        if not position:
            self._rows[0, self._drafter] = 0  # the drafter has no row for position -1
        self._rows_seen.update(self._rows[position])
        self._gdn[...] = gdn.reshape(layers, _GDN_BYTES)
        self._conv[:, :-1] = self._conv[:, 1:].copy()
        self._conv[:, -1] = conv.reshape(layers, _CONV_BYTES)
        self._ple[:-1] = self._ple[1:].copy()
        self._ple[-1] = ple
        self._last_token[0] = token
        self._ring[self._ring_at[0]] = ring
        self._ring_at[0] = (self._ring_at[0] + 1) % DRAFTER_WINDOW
        if not position:
            self._pooled[0] = dead.view("<f2")
        self._index(position, key, block)
        self.position = position + 1

    def _index(self, position: int, key: npt.NDArray[np.uint8], block: npt.NDArray[np.uint8]) -> None:
        """Keep an index key until its span is complete, then pool the span's keys into one row."""
        span, place = divmod(position, POOL)
        if place < POOL - 1:
            self._tail[place] = key
            return
        pooled = blake3(self._tail.tobytes() + key.tobytes(), key=self._key).digest(length=_KEY_BYTES)
        self._pooled[span + 1] = self._pooled[span]  # the dead key, one row on
        self._pooled[span] = np.frombuffer(pooled, "<f2")
        self._block_pos[span] = block.view("<i4")[0]
