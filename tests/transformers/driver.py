"""Drives a tiny model for the contract suite of `kvstore.testing`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvstore.adapters.transformers import TransformersEngine
from kvstore.arrays import Array
from kvstore.ids import TokenArray

from .models import engine, tokens

__all__ = ["Driver"]


class Driver:
    """One model in one dtype, as `kvstore.testing.EngineDriver` wants it."""

    def __init__(self, name: str, dtype: str = "f32") -> None:
        self._name, self._dtype = name, dtype
        self._logits: dict[int, torch.Tensor] = {}

    def make(self) -> TransformersEngine:
        """Make an engine at position 0. The model is built once a process, the engine has a cache of its own."""
        return engine(self._name, self._dtype)

    def close(self, engine: TransformersEngine) -> None:
        """Forget it."""
        engine.reset()
        self._logits.pop(id(engine), None)

    def tokens(self, count: int, seed: int) -> TokenArray:
        """Make up token ids."""
        return tokens(count, seed)

    def feed(self, engine: TransformersEngine, tokens: TokenArray) -> None:
        """Let the model read a batch."""
        self._logits[id(engine)] = engine.feed(tokens)

    def parts(self, engine: TransformersEngine, length: int) -> Mapping[str, Array]:
        """Hand out everything that the engine holds."""
        return engine.arrays(engine.position)

    def observe(self, engine: TransformersEngine) -> bytes:
        """Give the logits of the last position."""
        return bytes(self._logits[id(engine)].float().numpy().tobytes())
