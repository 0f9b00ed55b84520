"""A context: the engine that evaluates tokens and holds the attention state of its sequences."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from benches.llamacpp.library import BUILD, DriverError
from benches.llamacpp.model import Model

__all__ = ["KV_TYPES", "Context", "Logits"]

Logits: TypeAlias = npt.NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


class Context:
    """A `llama_context` with a unified KV cache. Not thread-safe.

    Parameters
    ----------
    model : Model
        Must outlive the context.
    n_ctx : int
        Cells of the cache, shared by all sequences. The memory is taken at once.
    n_batch, n_ubatch : int
        Tokens that one call and one pass of the graph take. The bytes of the state depend on `n_ubatch` and on where a
        batch begins, in their last bits.
    flash_attn : bool
        Without it V lies transposed and cannot be quantised.
    type_k, type_v : str
        What the cache stores, a name of `KV_TYPES`.
    n_seq_max : int
        The adapter needs two: the session and a scratch sequence.
    unified : bool
        Whether the sequences share cells; the adapter needs that.
    swa_full : bool
        Whether a sliding window's layers have a cell for every position, or only as many as the window needs.
    threads : int, optional
        By default as many as this process may run on.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_batch: int = 512,
        n_ubatch: int = 512,
        *,
        flash_attn: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        n_seq_max: int = 2,
        unified: bool = True,
        swa_full: bool = True,
        threads: int | None = None,
    ) -> None:
        self.model = model
        self.library = model.library
        self._c = self.library.c
        self.n_batch = n_batch
        self.settings: dict[str, str | int] = {
            "build": BUILD,
            "weights": model.digest(),
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "flash_attn": int(flash_attn),
        }
        params: Any = self._c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch, n_seq_max
        params.n_threads = params.n_threads_batch = threads or len(os.sched_getaffinity(0))
        params.flash_attn_type = int(flash_attn)  # 1 on, 0 off; the default, -1, leaves it to the build
        params.type_k, params.type_v, params.kv_unified = KV_TYPES[type_k], KV_TYPES[type_v], unified
        params.swa_full = swa_full
        self._pointer: int | None = self._c.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise self.library.error(f"cannot make a context of {n_ctx} tokens with {type_k}/{type_v}")
        self._memory = self._c.llama_get_memory(self._pointer)
        self._batch: Any = self._c.llama_batch_init(n_batch, 0, 1)

    @property
    def pointer(self) -> int:
        """The address of the `llama_context`, as the adapter takes it."""
        if self._pointer is None:
            raise DriverError("the context is closed")
        return self._pointer

    def decode(
        self, tokens: Sequence[int] | npt.NDArray[Any], position: int, seq: int = 0, on_progress: Progress | None = None
    ) -> Logits:
        """Evaluate tokens at `position` and after; return a copy of the last one's logits.

        Batches of `n_batch` are cut from the first of `tokens` on, so two calls with equal arguments compute equal bytes.

        Parameters
        ----------
        tokens : sequence of int
            At least one.
        position : int
            Where the first goes. The sequence must stand there.
        seq : int
            The sequence.
        on_progress : callable, optional
            Called after each batch with tokens done and tokens in all.

        Raises
        ------
        DriverError
            When llama.cpp refuses: no room in the context, a position that does not follow, no such sequence.
        """
        pointer, batch = self.pointer, self._batch
        ids = [int(t) for t in tokens]
        if not ids:
            raise DriverError("nothing to decode")
        for start in range(0, len(ids), self.n_batch):
            piece = ids[start : start + self.n_batch]
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i] = token
                batch.pos[i] = position + start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = start + i == len(ids) - 1
            code = self._c.llama_decode(pointer, batch)
            if code:
                raise self.library.error(f"llama_decode returned {code} for {len(piece)} tokens at {position + start}")
            if on_progress is not None:
                on_progress(start + len(piece), len(ids))
        logits = self._c.llama_get_logits_ith(pointer, -1)
        if not logits:
            raise self.library.error("llama_decode left no logits")
        copied: Logits = np.ctypeslib.as_array(logits, shape=(self.model.n_vocab,)).astype(np.float32, copy=True)
        return copied

    def greedy(self, logits: Logits, count: int, seq: int = 0) -> list[int]:
        """Sample `count` tokens greedily, the first from `logits`. All but the last of them are evaluated, too."""
        sampled: list[int] = []
        while len(sampled) < count:
            sampled.append(int(np.argmax(logits)))
            if len(sampled) < count:
                logits = self.decode(sampled[-1:], self.position(seq), seq)
        return sampled

    def position(self, seq: int = 0) -> int:
        """Positions that a sequence holds, which is where its next token goes."""
        self._open()
        return int(self._c.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def truncate(self, position: int, seq: int = 0) -> None:
        """Drop a sequence's positions from `position` on.

        Raises
        ------
        DriverError
            When the model's memory cannot be cut there.
        """
        self._open()
        if not self._c.llama_memory_seq_rm(self._memory, seq, position, -1):
            raise DriverError(f"this model's memory cannot be cut at {position}")

    def probe(self, seq: int) -> None:
        """Put one token into a sequence, so that the adapter can learn what the state looks like."""
        self.decode([0], 0, seq)

    def _open(self) -> None:
        if self._pointer is None:
            raise DriverError("the context is closed")

    def close(self) -> None:
        """Free the state. Closing twice is harmless."""
        if self._pointer is not None:
            pointer, self._pointer = self._pointer, None
            self._c.llama_batch_free(self._batch)
            self._c.llama_free(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
