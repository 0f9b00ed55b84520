"""llama-cpp-python's `LlamaDiskCache`, with the real model: entries are states of the whole context, pickled, in diskcache."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import LlamaDiskCache

from benches.peers.driver import Driver
from benches.peers.llama_state import Blob
from benches.peers.shape import Bytes, Shape, Tokens

__all__ = ["DRIVER"]


class _DiskCache(Driver):
    own: ClassVar[str] = "a llama.cpp context"

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        super().__init__(shape, threads, **options)
        self.llama: Any = llama_cpp.Llama(
            options["model"], n_ctx=int(options["context"]) + 256, n_batch=512, flash_attn=True, n_threads=threads, verbose=False
        )
        self.llama.eval([0])
        self.blob = Blob(shape, self._get())
        self.cache: Any = None
        self.popped: Any = None

    @property
    def _context(self) -> Any:
        return self.llama._ctx.ctx

    def _get(self) -> Bytes:
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        blob = np.empty(size, np.uint8)
        pointer = blob.ctypes.data_as(c.POINTER(c.c_uint8))
        if llama_cpp.llama_state_seq_get_data(self._context, pointer, size, 0) != size:
            raise OSError("llama.cpp did not hand out its state")
        return blob

    def open(self, directory: Path, tokens: int) -> None:
        self.cache = LlamaDiskCache(str(directory), capacity_bytes=1 << 40)

    def close(self) -> None:
        if self.cache is not None:
            self.cache.cache.close()
            self.cache = None

    def before_save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        blob = self.blob.build(arrays, len(tokens))
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        pointer = blob.ctypes.data_as(c.POINTER(c.c_uint8))
        if llama_cpp.llama_state_seq_set_data(self._context, pointer, blob.size, 0) != blob.size:
            raise OSError("llama.cpp did not take the rows")
        self.llama.input_ids[: len(tokens)] = tokens
        self.llama.n_tokens = len(tokens)

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        self.cache[tokens.tolist()] = self.llama.save_state()

    def before_restore(self) -> None:
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        # as Llama does at the start of a completion
        prompt = tokens.tolist()
        try:
            state = self.cache[prompt]
        except KeyError:
            return 0
        self.popped = state
        length: int = llama_cpp.Llama.longest_token_prefix(state.input_ids[: state.n_tokens].tolist(), prompt)
        self.llama.load_state(state)
        if length < state.n_tokens:
            self.llama._ctx.kv_cache_seq_rm(-1, length, -1)
            self.llama.n_tokens = length
        return length

    def after_restore(self) -> None:
        # a hit removes the entry; a completion would store a longer one in its place
        if self.popped is not None:
            state, self.popped = self.popped, None
            self.cache[state.input_ids[: state.n_tokens].tolist()] = state

    def deliver(self, arrays: Sequence[Bytes], length: int) -> None:
        if length:
            self.blob.take(self._get(), arrays, length)


DRIVER = _DiskCache
