"""The library's contract suite on the adapter, over a model of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benches.llamacpp import Context, Model
from benches.llamacpp.context import Logits
from kvstore.adapters.llamacpp import LlamaCppEngine
from kvstore.arrays import Array
from kvstore.ids import TokenArray
from kvstore.testing import check_engine

from .kinds import KINDS, engine_on, random_tokens

pytestmark = pytest.mark.model
BLOCK = 32


class Driver:
    """Engines on one model, each on a context of its own."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name
        self._running: dict[int, tuple[Context, Logits]] = {}

    def make(self) -> LlamaCppEngine:
        """Make a context and an engine on it."""
        context = Context(self._model, 256, n_batch=64, n_ubatch=64, threads=1)
        engine = engine_on(context, self._name, block_tokens=BLOCK)
        self._running[id(engine)] = context, np.zeros(0, np.float32)
        return engine

    def close(self, engine: LlamaCppEngine) -> None:
        """Free the context."""
        self._running.pop(id(engine))[0].close()

    def tokens(self, count: int, seed: int) -> TokenArray:
        """Make up tokens of the model's vocabulary."""
        return random_tokens(seed, count)

    def feed(self, engine: LlamaCppEngine, tokens: TokenArray) -> None:
        """Evaluate tokens where the sequence ends."""
        context, _ = self._running[id(engine)]
        self._running[id(engine)] = context, context.decode(tokens, context.position())

    def parts(self, engine: LlamaCppEngine, length: int) -> Mapping[str, Array]:
        """Rows up to a length, and the states where the sequence ends."""
        context, _ = self._running[id(engine)]
        position = context.position()
        whole = {name: array.copy() for name, array in engine.arrays(position).items()} if position else {}
        for name in [name for name in whole if name.startswith("r.")]:
            # llama.cpp clears the history of a new sequence by multiplying what lay there with zero: until the sequence is as
            # long as the history, the sign of its zeros is the last user's. Adding zero makes all of them positive.
            whole[name] += 0
        for stream in engine.layout().streams if position else ():
            whole[stream.name] = whole[stream.name][(slice(None),) * stream.token_axis + (slice(length),)]
        return whole

    def observe(self, engine: LlamaCppEngine) -> bytes:
        """The last position's logits."""
        return self._running[id(engine)][1].tobytes()


@pytest.mark.parametrize("name", KINDS)
def test_the_contract(tiny: Mapping[str, Model], tmp_path: Path, name: str) -> None:
    """The adapter passes every check of the contract suite, negative controls of each stream and state among them."""
    report = check_engine(Driver(tiny[name], name), store_path=tmp_path / "s")
    report.raise_for_failures()
