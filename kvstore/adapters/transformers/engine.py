"""A model with one cache as an engine: takes out what is new, puts back what is stored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.adapters.transformers.form import CacheForm, learn
from kvstore.adapters.transformers.identity import model_identity
from kvstore.adapters.transformers.reader import Reader
from kvstore.arrays import Array
from kvstore.errors import EngineError
from kvstore.ids import Tokens, as_tokens
from kvstore.layout import Layout
from kvstore.tier import Captured, Restored

__all__ = ["TransformersEngine"]


class TransformersEngine:
    """One sequence of a model, as `kvstore.tier.Engine` wants it. Not thread-safe.

    The form of the cache is learned when the engine is made, by a forward pass over one token. Full attention becomes streams
    (`k.3`, `v.3`: a row for each token), sliding and chunked attention become windows (`window_k.0`: the rows that are left,
    a state), linear attention becomes states (`conv.1.0`, `recurrent.1.0`).

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, in evaluation mode.
    name : str
        The model's name and revision, for people.
    weights : str
        A digest of its weights, `weights_digest(model)` for one.
    identity : mapping of str to (str or int), optional
        What else changes the bytes: kernels that are installed (flash-linear-attention, causal-conv1d), a quantisation made
        after loading, tensor parallelism. Found out from the model and not to be given: class, configuration, dtype, attention
        and experts implementation, the versions of Transformers and PyTorch, the kind of device, the precision of float32
        products. All of it as it is when the engine is made: who changes it makes a new one.
    block_tokens : int
        As for `Layout`.

    Attributes
    ----------
    cache : DynamicCache
        What the model has computed so far. `feed` extends it.
    position : int
        How many tokens it has seen.
    form : CacheForm
        What the model's caches hold.
    reader : Reader
        How it reads.

    Raises
    ------
    LayoutError
        When the model's cache is of a kind that the adapter doesn't take; says which layer and what.
    EngineError
        When the model is in training mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        name: str,
        weights: str,
        identity: Mapping[str, str | int] | None = None,
        block_tokens: int = 0,
    ) -> None:
        self.reader = Reader(model)
        named = model_identity(model, weights=weights, given=identity or {})
        self.form: CacheForm = learn(model)
        self._layout = Layout(self.form.streams(), self.form.states(), name, named, block_tokens=block_tokens)
        self.cache: DynamicCache = self.form.empty()
        self.position = 0

    def layout(self) -> Layout:
        """See `Engine.layout`."""
        return self._layout

    def feed(self, tokens: Tokens, *, chunk: int = 0) -> torch.Tensor:
        """Let the model read tokens on top of the cache.

        Parameters
        ----------
        tokens : sequence of int, or integer array
            What comes next.
        chunk : int
            The most tokens in a forward pass; 0 for one pass.

        Returns
        -------
        torch.Tensor
            The logits of the last token, of shape [vocabulary].

        Raises
        ------
        Exception
            Whatever the model raises. The engine has been reset then: the cache may hold a part of a pass.
        """
        ids = as_tokens(tokens)
        if chunk < 0:
            raise EngineError(f"chunk must be the most tokens in a pass, or 0 for one pass, got {chunk}")
        self.reader.check()
        try:
            logits = self.reader.read(self.cache, ids, chunk=chunk)
        except BaseException:  # recurrent states don't tell that they are of a later position
            self.reset()
            raise
        self.position += ids.size
        return logits

    def adopt(self, cache: object, length: int) -> None:
        """Stand on a cache that somebody else has filled with `length` tokens. It is used, not copied.

        Raises
        ------
        ArrayError
            When it isn't one sequence of so many tokens in a cache like the model's own. Nothing is changed then.
        EngineError
            When the model's last prompt had images, or it is in training mode, see `Reader.check`.
        """
        self.reader.check()
        self.form.check(cache, length)
        assert isinstance(cache, DynamicCache)
        self.cache, self.position = cache, length

    def capture(self, start: int, stop: int) -> Captured:
        """Hand out the rows of [start, stop), and windows and states if the engine stands at `stop`.

        On the CPU they are views of the cache's own tensors: the next token changes states in place.

        Raises
        ------
        EngineError
            When the engine hasn't computed these positions.
        ArrayError
            When the cache isn't what the layout was learned from.
        """
        if not 0 <= start < stop <= self.position:
            raise EngineError(f"the engine stands at {self.position}, asked for [{start}, {stop})")
        self.reader.check()
        self.form.check(self.cache, self.position)
        states = self.form.states_of(self.cache, stop) if stop == self.position else {}
        return Captured(self.form.rows(self.cache, start, stop), states)

    def apply(self, restored: Restored) -> None:
        """Take a stored prefix into a new cache. The one that was there is left as it is."""
        arrays = self.form.room(restored.length)
        restored.copy_into(arrays)
        if self._layout.states:
            arrays.update(restored.states())
        self.cache = self.form.build(restored.length, arrays)
        self.position = restored.length

    def reset(self) -> None:
        """Stand at position 0, on a new cache."""
        self.cache, self.position = self.form.empty(), 0

    def arrays(self, length: int) -> dict[str, Array]:
        """View everything at `length`, where the engine must stand, as `kvstore.layout.state_hash` takes it.

        Raises
        ------
        EngineError
            When the engine stands elsewhere.
        """
        if length != self.position or not length:
            raise EngineError(f"the engine stands at {self.position}, asked for all of {length} tokens")
        captured = self.capture(0, length)
        return {name: np.asarray(array) for name, array in (*captured.streams.items(), *captured.states.items())}
