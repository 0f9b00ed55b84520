"""kvstore with its adapter for llama.cpp, as a server uses it: promote and cascade. It runs in the project's own Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benches.peers.drivers.llama_slots import LlamaDriver
from benches.peers.shape import Bytes, Shape, Tokens
from kvstore import SessionTier, Store
from kvstore.adapters.llamacpp import LlamaCppEngine

__all__ = ["DRIVER"]


class _KVStoreLlama(LlamaDriver):
    durable: ClassVar[bool] = True

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        super().__init__(shape, threads, **options)
        context = self.engine.context
        self.adapter = LlamaCppEngine(
            context.library.c, context.pointer, model="peers", identity=context.settings, probe=context.probe
        )
        self.store: Store | None = None

    def open(self, directory: Path, tokens: int) -> None:
        new = not (directory / "data.mdb").exists()
        cap = 4 * tokens * self.shape.token_bytes + (64 << 20)
        self.store = Store.open(directory, max_bytes=cap if new else None)
        self.tier = SessionTier(self.store, self.adapter, salt=b"")

    def close(self) -> None:
        if self.store is not None:
            self.tier.close()
            self.store.close()
            self.store = None

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        self.tier.cascade(tokens)
        self.tier.flush()

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        # promote leaves the last token of a prompt to the engine, which needs its logits: one more is asked for
        return self.tier.promote(np.append(tokens, tokens[-1:]))


DRIVER = _KVStoreLlama
