"""The form of a model's cache: learned once from a forward pass over one token, then used to take caches apart and build them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.adapters.transformers.layers import LayerForm, Part, cut, learn_layer
from kvstore.adapters.transformers.tensors import tensor_of, view_of
from kvstore.arrays import Array
from kvstore.errors import ArrayError, EngineError, LayoutError
from kvstore.ids import TokenArray
from kvstore.layout import State, Stream

__all__ = ["CacheForm", "cache_argument", "forward", "learn"]

# What a DynamicCache holds beside its layers: `generate` marks a cache that it was given
_KNOWN = {"layers", "layer_class_to_replicate", "offloading", "only_non_sliding", "_is_user_defined"}


@dataclass(frozen=True, slots=True)
class CacheForm:
    """What the caches of one model hold. Immutable.

    Attributes
    ----------
    config : PreTrainedConfig
        The model's configuration.
    layers : tuple of LayerForm
        In order.
    """

    config: Any
    layers: tuple[LayerForm, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All tensors, layer by layer."""
        return tuple(part for layer in self.layers for part in layer.parts)

    def streams(self) -> tuple[Stream, ...]:
        """Describe what has a row for each token, for a layout."""
        return tuple(part.stream() for part in self.parts if part.kind == "rows")

    def states(self) -> tuple[State, ...]:
        """Describe windows and states, for a layout."""
        return tuple(part.state() for part in self.parts if part.kind != "rows")

    def recurrent(self) -> bool:
        """Whether no layer of a cache tells how many tokens it has seen."""
        return all(part.kind == "state" for part in self.parts)

    def empty(self) -> DynamicCache:
        """Make a cache without tokens, as the model makes its own."""
        return DynamicCache(config=self.config)

    def check(self, cache: Any, length: int) -> None:
        """Refuse what isn't one sequence of `length` tokens in a cache of this form.

        A cache of recurrent layers alone doesn't tell its length: there the caller is believed.

        Raises
        ------
        ArrayError
            Says what was found, and what was expected.
        """
        if type(cache) is not DynamicCache:
            raise ArrayError(
                f"expected a DynamicCache, got a {type(cache).__name__}; static, quantized, encoder-decoder and derived caches are "
                "not taken"
            )
        if cache.offloading:
            raise ArrayError("the cache offloads its layers, which this adapter doesn't take; make one with offloading=False")
        odd = sorted(set(vars(cache)) - _KNOWN)
        if odd:
            raise ArrayError(f"this adapter doesn't know what {odd} of the cache are, so it can't vouch for a restored one")
        if len(cache.layers) != len(self.layers):
            raise ArrayError(f"the cache has {len(cache.layers)} layers, the model's own {len(self.layers)}")
        for number, (form, layer) in enumerate(zip(self.layers, cache.layers, strict=True)):
            form.check(layer, number, length)

    def rows(self, cache: DynamicCache, start: int, stop: int) -> dict[str, Array]:
        """View the rows of [start, stop) of every stream in the cache's own memory. Copies where that isn't the host's."""
        return {part.name: view_of(cut(part, tensor, start, stop)) for part, tensor in self._held(cache) if part.kind == "rows"}

    def states_of(self, cache: DynamicCache, length: int) -> dict[str, Array]:
        """View every window and state after `length` tokens, as `rows` does."""
        return {part.name: view_of(cut(part, tensor, 0, length)) for part, tensor in self._held(cache) if part.kind != "rows"}

    def room(self, length: int) -> dict[str, Array]:
        """Make arrays for the rows of `length` tokens, in the layout's order. `build` turns them into tensors without a copy."""
        # torch's memory, so that it is aligned like that of the tensors which torch makes itself
        parts = [part for part in self.parts if part.kind == "rows"]
        return {part.name: view_of(torch.empty(part.extent(length), dtype=part.dtype)) for part in parts}

    def build(self, length: int, arrays: Mapping[str, Array]) -> DynamicCache:
        """Build a cache that has seen `length` tokens on top of these arrays. On the CPU it owns their memory from now on.

        Parameters
        ----------
        length : int
            At least 1.
        arrays : mapping of str to ndarray
            Every stream's rows, and every window and state.
        """
        cache = self.empty()
        for form, layer in zip(self.layers, cache.layers, strict=True):
            form.fill(layer, length, {part.name: tensor_of(arrays[part.name], part.dtype, part.device) for part in form.parts})
        self.check(cache, length)
        return cache

    def _held(self, cache: DynamicCache) -> Iterator[tuple[Part, torch.Tensor]]:
        for form, layer in zip(self.layers, cache.layers, strict=True):
            for part in form.parts:
                tensor = part.of(layer)
                if tensor is not None:
                    yield part, tensor


def learn(model: torch.nn.Module) -> CacheForm:
    """Learn the form of a model's cache by a forward pass over one token. The model must be in evaluation mode.

    Only a pass shows all of it: configurations name the kinds of layers, but not the shapes of all states, nor their dtypes.

    Raises
    ------
    LayoutError
        When the cache, or something in it, is of a kind that this adapter doesn't take.
    EngineError
        When the model is in training mode, where dropout would make every state another.
    """
    if model.training:
        raise EngineError("the model is in training mode, in which equal tokens give other states each time; call model.eval()")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(f"{type(model).__name__} is an encoder-decoder, whose cross attention this adapter doesn't take")
    cache = DynamicCache(config=config)
    forward(model, cache, np.zeros(1, np.uint32))
    form = CacheForm(config, tuple(learn_layer(layer, number) for number, layer in enumerate(cache.layers)))
    if not form.parts:
        raise LayoutError(f"{type(model).__name__} has put nothing into a DynamicCache: it keeps its state elsewhere")
    return form


def cache_argument(model: torch.nn.Module) -> str:
    """Name the argument in which a model takes its cache: `cache` from Transformers 5.24 on, before that one of two others.

    Raises
    ------
    LayoutError
        When it takes none.
    """
    names = _arguments(model)
    for name in ("cache", "past_key_values", "cache_params"):
        if name in names:
            return name
    raise LayoutError(f"{type(model).__name__}.forward takes no cache")


def forward(model: torch.nn.Module, cache: DynamicCache, tokens: TokenArray) -> torch.Tensor:
    """Let a model read tokens on top of a cache; give the logits of the last one, of shape [vocabulary]."""
    any_model: Any = model
    extra: dict[str, Any] = {cache_argument(model): cache}
    if "logits_to_keep" in _arguments(model):
        extra["logits_to_keep"] = 1  # else they are computed for every token, which is most of the memory of a long prompt
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(any_model.get_input_embeddings().weight.device)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, return_dict=True, **extra).logits
    return logits[0, -1]


def _arguments(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    any_model: Any = model
    base = any_model.get_base_model() if hasattr(any_model, "get_base_model") else any_model  # a PEFT model passes all on
    return inspect.signature(base.forward).parameters
