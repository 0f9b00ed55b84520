"""The layout of the synthetic hybrid: every kind of state that a modern model keeps, a few bytes each."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvstore.layout import Layout, State, Stream

__all__ = [
    "ATTENTION_LAYERS",
    "DRAFTER_WINDOW",
    "KEY",
    "POOL",
    "RECURRENT_LAYERS",
    "KVFormat",
    "hybrid_layout",
]

KVFormat: TypeAlias = Literal["int8", "int4", "f16"]

_LAYERS = 48
ATTENTION_LAYERS = tuple(layer for layer in range(_LAYERS) if layer % 4 == 3)
RECURRENT_LAYERS = tuple(layer for layer in range(_LAYERS) if layer % 4 != 3)
POOL = 64  # positions that one pooled index key stands for
DRAFTER_WINDOW = 8  # positions that the drafter's ring holds
KEY = 8  # elements (f16) of an index key, of a row of the drafter, of a per-layer embedding
_HEADS, _HEAD = 2, 8


def hybrid_layout(kv: KVFormat = "int8", *, positions: int = 4096, block_tokens: int = POOL) -> Layout:
    """Describe the synthetic hybrid's session.

    Parameters
    ----------
    kv : {"int8", "int4", "f16"}
        The format of attention K and V: int8 or packed 4-bit with a scale for each head and position, which are streams of
        their own, or f16 without.
    positions : int
        The most positions that a session may have: the bound of `index.block_pos`.
    block_tokens : int
        A multiple of 64.
    """
    streams: list[Stream] = []
    for layer in ATTENTION_LAYERS:
        streams += _attention(kv, layer)
    streams += [Stream("drafter.k", "f16", (KEY,)), Stream("drafter.v", "f16", (KEY,))]
    streams.append(Stream("index.pooled", "f16", (KEY,), tokens_per_row=POOL))
    states: list[State] = []
    for layer in RECURRENT_LAYERS:
        states += [State(f"gdn.{layer}.state", "f32", (2, 4)), State(f"gdn.{layer}.conv", "f16", (3, 4))]
    states += [
        State("index.tail", "f16", (POOL - 1, KEY), bounded=(0,)),
        State("index.block_pos", "i32", (positions // POOL,), bounded=(0,)),
        State("index.dead", "f16", (KEY,)),
        State("ple.history", "f16", (3, KEY)),
        State("last_token", "u32", (1,)),
        State("drafter.ring", "f16", (DRAFTER_WINDOW, KEY), bounded=(0,)),
        State("drafter.ring_at", "i32", (1,)),
    ]
    return Layout(tuple(streams), tuple(states), model="synthetic-hybrid", identity={"kv": kv}, block_tokens=block_tokens)


def _attention(kv: KVFormat, layer: int) -> list[Stream]:
    """K with its token axis in the middle, V with its token axis in front: engines have both."""
    if kv == "f16":
        return [Stream(f"attn.{layer}.k", "f16", (_HEADS, _HEAD), 1), Stream(f"attn.{layer}.v", "f16", (_HEADS, _HEAD))]
    label = {"int8": "i8", "int4": "i4"}[kv]
    return [
        Stream(f"attn.{layer}.k", label, (_HEADS, _HEAD), 1),
        Stream(f"attn.{layer}.k_scale", "f16", (_HEADS,), 1),
        Stream(f"attn.{layer}.v", label, (_HEADS, _HEAD)),
        Stream(f"attn.{layer}.v_scale", "f16", (_HEADS,)),
    ]
