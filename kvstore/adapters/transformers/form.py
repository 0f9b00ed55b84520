"""The form of a model's cache: learned once from a forward pass over one token, then used to take caches apart and build them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from kvstore.adapters.transformers.layers import LayerForm, Part, cut, learn_layer
from kvstore.adapters.transformers.reader import Reader
from kvstore.adapters.transformers.tensors import tensor_of, view_of
from kvstore.arrays import Array
from kvstore.errors import ArrayError, KVStoreError, LayoutError
from kvstore.layout import State, Stream

__all__ = ["CacheForm", "learn"]

# What a DynamicCache holds beside its layers: `generate` marks a cache that it was given
_KNOWN = {"layers", "layer_class_to_replicate", "offloading", "only_non_sliding", "_is_user_defined"}

# The first version whose models of linear attention read on rightly from any cache, tried with those of the tests
_RESUMES = (5, 18)


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
        As `Reader.check`.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(f"{type(model).__name__} is an encoder-decoder, whose cross attention this adapter doesn't take")
    cache = DynamicCache(config=config)
    reader = Reader(model)
    try:
        reader.read(cache, np.zeros(1, np.uint32))
    except KVStoreError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise LayoutError(
            f"{type(model).__name__} could not read a token on a DynamicCache ({error}): it has a cache of its own"
        ) from error
    form = CacheForm(config, tuple(learn_layer(layer, number) for number, layer in enumerate(cache.layers)))
    for number, layer in enumerate(form.layers):
        if not layer.parts and layer.kind.__name__ != "DummyLayer":
            raise LayoutError(
                f"{type(model).__name__} has put nothing into layer {number} of its cache, a {layer.kind.__name__}: it keeps that "
                "layer's state elsewhere, where it can't be saved"
            )
    if _version() < _RESUMES and any(part.kind == "state" for part in form.parts):
        raise LayoutError(
            f"Transformers {transformers.__version__} lets some layers of linear attention forget their state where several tokens "
            f"are read on top of a cache; install {'.'.join(map(str, _RESUMES))} or newer"
        )
    return form


def _version() -> tuple[int, ...]:
    return tuple(int(number) for number in transformers.__version__.split(".")[:2])
