"""Drivers of the synthetic engines for the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from kvstore import Layout, State, Stream
from kvstore.ids import TokenArray
from kvstore.testing import HashEngine, SyntheticHybrid

from .whole import ExtensionTypes

Arrays: TypeAlias = Mapping[str, Any]

PLAIN = Layout(
    (Stream("k", "f16", (2, 8), 1), Stream("v", "u8", (24,)), Stream("vt", "f32", (4,), 1), Stream("pool", "f32", (3,), 0, 4)),
    block_tokens=16,
    model="plain",
)
HYBRID = Layout(
    (Stream("k", "bf16", (2, 8), 1), Stream("v", "i4", (24,)), Stream("pool", "f16", (4,), 0, 8)),
    (State("r", "f32", (30,)), State("window", "f16", (3, 9), (1,)), State.opaque("blob", 90)),
    block_tokens=16,
    model="hybrid",
)
RECURRENT = Layout((), (State("r", "f32", (64,)), State("conv", "u16", (3, 4))), block_tokens=16, model="recurrent")
EXTENSION = Layout(
    (Stream("k", "bf16", (2, 8), 1), Stream("v", "f8_e4m3", (12,)), Stream("pool", "bf16", (4,), 0, 8)),
    (State("r", "bf16", (30,)), State("window", "f8_e4m3", (3, 9), (1,))),
    block_tokens=16,
    model="extension",
)
# its window is empty at 41 positions, and isn't at 40
EMPTY = Layout((Stream("k", "u8", (8,)),), (State("window", "f16", (3, 7), (1,)),), block_tokens=16, model="empty")
LAYOUTS = {"plain": PLAIN, "hybrid": HYBRID, "recurrent": RECURRENT}


def made_up(count: int, seed: int) -> TokenArray:
    """Token ids below a thousand."""
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.uint32)


class HashDriver:
    """Drives `HashEngine`, or something derived from it, over one layout."""

    def __init__(self, layout: Layout, kind: Callable[[Layout], HashEngine] = HashEngine) -> None:
        self.layout = layout
        self.kind = kind
        self.alive = 0

    def make(self) -> HashEngine:
        """Make one."""
        self.alive += 1
        return self.kind(self.layout)

    def close(self, engine: HashEngine) -> None:
        """Count."""
        self.alive -= 1

    def tokens(self, count: int, seed: int) -> TokenArray:
        """Make some up."""
        return made_up(count, seed)

    def feed(self, engine: HashEngine, tokens: TokenArray) -> None:
        """Read them."""
        engine.feed(tokens)

    def parts(self, engine: HashEngine, length: int) -> Arrays:
        """Views of the engine's own arrays."""
        return engine.typed() if isinstance(engine, ExtensionTypes) else {**engine.streams, **engine.states}

    def observe(self, engine: HashEngine) -> bytes:
        """What it would say next."""
        return engine.observe()


class HybridDriver:
    """Drives `SyntheticHybrid`, or something derived from it."""

    def __init__(self, make: Callable[[], SyntheticHybrid] = SyntheticHybrid) -> None:
        self.kind = make

    def make(self) -> SyntheticHybrid:
        """Make one."""
        return self.kind()

    def close(self, engine: SyntheticHybrid) -> None:
        """There is nothing to release."""

    def tokens(self, count: int, seed: int) -> TokenArray:
        """Make some up."""
        return made_up(count, seed)

    def feed(self, engine: SyntheticHybrid, tokens: TokenArray) -> None:
        """Read them."""
        engine.feed(tokens)

    def parts(self, engine: SyntheticHybrid, length: int) -> Arrays:
        """Views of the engine's own arrays."""
        return engine.parts()

    def observe(self, engine: SyntheticHybrid) -> bytes:
        """What it would say next."""
        return engine.observe()
