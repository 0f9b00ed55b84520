"""Engines on the tiny models, and what a test compares of them; used by the tests and by the processes that they start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benches.llamacpp import Context, Model
from kvstore import SessionTier, Store
from kvstore.adapters.llamacpp import LlamaCppEngine
from kvstore.adapters.llamacpp.functions import Functions
from kvstore.ids import TokenArray
from kvstore.layout import state_hash

from .tiny import MODELS, VOCABULARY, WINDOW

KINDS = sorted(MODELS)
PARTIAL_KINDS = sorted(set(MODELS) - {"qwen3"})  # with something that is valid at one position only
WINDOW_KINDS = ["gemma3", "lfm2-window"]
ROWS_KINDS = ["gemma3", "lfm2", "qwen3", "qwen35"]  # with layers that see every position
BLOCK = 128
TURN = 300
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, BLOCK - 1, BLOCK, BLOCK + 1, TURN]
AFTER = 20


def random_tokens(seed: int, count: int) -> TokenArray:
    """Make up a prompt; another for each seed."""
    return np.random.default_rng(seed).integers(1, VOCABULARY, count).astype(np.uint32)


def engine_on(context: Context, name: str, **options: Any) -> LlamaCppEngine:
    """Make an engine on a context, which restores block by block."""
    given = {"probe": context.probe, "block_tokens": BLOCK, "chunk_bytes": 1, **options}
    return LlamaCppEngine(context.library.c, context.pointer, model=name, identity=context.settings, **given)


@contextmanager
def running(model: Model, name: str, **settings: Any) -> Iterator[tuple[Context, LlamaCppEngine]]:
    """Make a context that computes the same bytes in every run, and an engine on it."""
    given = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "threads": 1, **settings}
    with Context(model, **given) as context:
        yield context, engine_on(context, name)


def raw_blob(context: Context) -> bytes:
    """Everything that llama.cpp says of the session's sequence."""
    functions = Functions(context.library.c, context.pointer)
    blob = np.empty(functions.size(0), np.uint8)
    assert functions.get(blob.ctypes.data, blob.size, 0) == blob.size
    return blob.tobytes()


def told(context: Context, engine: LlamaCppEngine, after: Sequence[int] | TokenArray) -> dict[str, Any]:
    """Let an engine read on, and say all that can be said of it: its state before and after, logits, and what it answers."""

    def state() -> list[str]:
        length = context.position()
        hashed = state_hash(engine.layout(), engine.arrays(length), length)
        return [str(hashed), blake3(raw_blob(context)).hexdigest(length=8)]

    before = state()
    logits = context.decode(after, context.position())
    first = blake3(logits.tobytes()).hexdigest(length=8)
    answer = context.greedy(logits, 12)
    return {"before": before, "logits": first, "answer": answer, "after": state()}


def resume(store: str, path: str, name: str) -> None:
    """Restore each session of `LENGTHS` and print what is told of it: the other process of a test."""
    found = []
    with (
        Model(Path(path)) as model,
        running(model, name) as (context, engine),
        Store.open(store) as opened,
        SessionTier(opened, engine) as tier,
    ):
        for length in LENGTHS:
            prompt = random_tokens(length, length + AFTER)
            reused = tier.promote(prompt)
            assert reused == context.position()
            found.append([reused, told(context, engine, prompt[reused:])])
    print(json.dumps(found))
