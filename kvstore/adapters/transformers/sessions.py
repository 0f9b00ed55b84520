"""Sessions of a Transformers model in a store: save a cache, restore one, generate with both."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.adapters.transformers.engine import TransformersEngine
from kvstore.adapters.transformers.generating import Generated, check_call, one_sequence, only_new
from kvstore.errors import EngineError
from kvstore.ids import TokenArray, Tokens, as_tokens
from kvstore.layout import Layout
from kvstore.radix import CheckpointPolicy
from kvstore.store import Namespace, Store
from kvstore.tier import CascadeResult, SessionTier, TierStats, WriteBehind

__all__ = ["TransformersSessions"]


class TransformersSessions:
    """Saves and restores the caches of one model. Its methods are called one at a time; many may share a store.

    Parameters
    ----------
    store : Store
        Stays the caller's; close this first.
    model : PreTrainedModel
        A decoder in evaluation mode. One forward pass over one token shows what its caches hold.
    name, weights, identity, block_tokens
        What names the model, as for `TransformersEngine`.
    salt : bytes
        Anything beside the model that changes the state, or keeps sessions apart: a LoRA that is switched on, a tenant. It is
        taken here once: each setting of LoRAs needs sessions of its own, and none is switched under them.
    check, write_behind, checkpoints
        As for `SessionTier`.
    """

    def __init__(
        self,
        store: Store,
        model: torch.nn.Module,
        *,
        name: str,
        weights: str,
        salt: bytes = b"",
        identity: Mapping[str, str | int] | None = None,
        block_tokens: int = 0,
        check: bool = False,
        write_behind: WriteBehind | None = None,
        checkpoints: CheckpointPolicy | None = None,
    ) -> None:
        self._model = model
        self._engine = TransformersEngine(model, name=name, weights=weights, identity=identity, block_tokens=block_tokens)
        self._tier = SessionTier(store, self._engine, salt=salt, check=check, write_behind=write_behind, checkpoints=checkpoints)

    def __enter__(self) -> TransformersSessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def layout(self) -> Layout:
        """What a session consists of."""
        return self._engine.layout()

    @property
    def namespace(self) -> Namespace:
        """Where the sessions are stored."""
        return self._tier.namespace

    @property
    def stats(self) -> TierStats:
        """What was saved and restored so far."""
        return self._tier.stats

    def save(self, cache: object, tokens: Tokens) -> CascadeResult:
        """Save what is new of a cache. It is copied before this returns; the writing is done behind (`flush` waits for it).

        Parameters
        ----------
        cache : DynamicCache
            One sequence, without padding. It stays the caller's and may be extended at once.
        tokens : sequence of int, or integer array
            Every token that it has seen, in order. What `generate` sampled last isn't among them: the model hasn't read it yet.

        Raises
        ------
        TokensError, ArrayError, StoreClosedError
            Misuse: a cache that isn't one sequence of so many tokens, or not of the kind that the model uses. Of a cache of
            recurrent layers alone the number of tokens isn't known: there the caller is believed. Faults of the environment
            don't raise: they are logged and counted.
        """
        prompt = as_tokens(tokens)
        self._engine.adopt(cache, prompt.size)
        try:
            return self._tier.cascade(prompt)
        finally:
            self._engine.reset()  # the cache is the caller's

    def restore(self, tokens: Tokens) -> tuple[DynamicCache, int]:
        """Restore the longest stored prefix of a prompt into a new cache.

        Returns
        -------
        cache : DynamicCache
            The caller's own: nothing that is done to it reaches the store, or another cache. After a miss one without tokens.
        reused : int
            How many tokens it has seen: at most len(tokens) - 1, so that something is left to compute; 0 is a miss. With
            windows or states that is where one was saved, else any number. Every byte of it has been checked.

        Raises
        ------
        TokensError, StoreClosedError
            Misuse. Faults of the environment don't raise: they are logged and counted, and the cache has no tokens.
        """
        reused = self._tier.promote(tokens)
        cache = self._engine.cache
        self._engine.reset()
        return cache, reused

    def generate(self, input_ids: torch.Tensor, *, boundary: int | None = None, **arguments: Any) -> Generated:
        """Generate as `model.generate` does, on top of what is stored of the prompt; save on the way and at the end.

        Parameters
        ----------
        input_ids : LongTensor[tokens] or LongTensor[1, tokens]
            The whole prompt.
        boundary : int, optional
            Where the next request will still agree with this one, at most len(prompt) - 1. By default as many tokens before the
            prompt's end as `CheckpointPolicy.boundary` says, at least 1. A prompt that ends in what a chat template adds for the
            answer, and takes away again, ends earlier for the next request.
        **arguments
            Of `model.generate`: for one sequence, greedy or sampled. `prefill_chunk_size` is heeded.

        Raises
        ------
        ArrayError, EngineError
            Misuse: several sequences, beams, assistants, images, a model in training mode, a boundary outside the prompt. Nothing
            was computed.
        """
        self._engine.reader.check()
        ids = one_sequence(input_ids, self._model)
        prompt = as_tokens(ids[0].cpu().numpy())
        length = prompt.size
        last = max(length - max(self._tier.checkpoints.boundary, 1), 0) if boundary is None else boundary
        if not 0 <= last < length:
            raise EngineError(f"boundary must be a position before the prompt's last token, 0 to {length - 1}, got {boundary}")
        settings = check_call(self._model, length, arguments)
        cache, reused = self.restore(prompt)
        position = reused
        chunk = int(settings.prefill_chunk_size or 0)
        for pause in self._pauses(prompt, reused, last):
            self._engine.reader.read(cache, prompt[position:pause], chunk=chunk)
            self.save(cache, prompt[:pause])
            position = pause
        given = {**arguments, "attention_mask": torch.ones_like(ids)}
        if chunk:  # all but the last token is read here: some versions cut up the whole prompt, whatever the cache has seen
            self._engine.reader.read(cache, prompt[position:-1], chunk=chunk)
            position = length - 1
            given["prefill_chunk_size"] = None
        with only_new(self._engine.reader.decoder, length, position):
            output = self._model.generate(ids, **{self._engine.reader.argument: cache}, **given)
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        self.save(cache, sequences[0, :-1].cpu().numpy())
        return Generated(sequences, reused, output)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was saved is stored (or has failed, which is counted); False when `timeout` seconds pass."""
        return self._tier.flush(timeout)

    def close(self) -> None:
        """Flush and end. Idempotent."""
        self._tier.close()

    def _pauses(self, prompt: TokenArray, reused: int, boundary: int) -> list[int]:
        """Positions in (reused, boundary] at which the prefill stands while a session is saved."""
        found = {min(pause, boundary) for pause in (*self._tier.pauses(prompt, reused), boundary)}
        return sorted(pause for pause in found if pause > reused)
