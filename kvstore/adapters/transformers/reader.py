"""How a model reads tokens on top of a cache."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.errors import EngineError, LayoutError
from kvstore.ids import TokenArray

__all__ = ["Reader"]

_SHIFT = "rope_deltas"  # by how much images shift the positions of what follows them: kept by the model for one prompt


class Reader:
    """A model's forward pass over tokens, whatever it calls its arguments.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; a PEFT model passes its arguments on to one.

    Attributes
    ----------
    argument : str
        In which it takes a cache: `cache` from Transformers 5.24 on, before that one of two other names.
    decoder : torch.nn.Module
        The model itself, or the one inside a PEFT model.

    Raises
    ------
    LayoutError
        When it takes none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        any_model: Any = model
        base = any_model.get_base_model() if hasattr(any_model, "get_base_model") else any_model
        names = inspect.signature(base.forward).parameters
        found = next((name for name in ("cache", "past_key_values", "cache_params") if name in names), None)
        if found is None:
            raise LayoutError(f"{type(base).__name__}.forward takes no cache; expected a causal language model")
        self.argument: str = found
        self.decoder: torch.nn.Module = base
        self._model = any_model
        self._shifting = [module for module in base.modules() if hasattr(module, _SHIFT)]
        # else logits are computed for every token, which is most of the memory of a long prompt
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def check(self) -> None:
        """Refuse a model whose cache isn't the whole of its state, or isn't what equal tokens give.

        Raises
        ------
        EngineError
            When the model is in training mode, where dropout makes every state another. When the last prompt that it read had
            images, whose positions stand beside its cache; one of text clears it.
        """
        if self._model.training:
            raise EngineError("the model is in training mode, in which equal tokens give other states each time; call model.eval()")
        for module in self._shifting:
            shift = getattr(module, _SHIFT)
            if shift is not None and bool((shift != 0).any()):
                raise EngineError(
                    f"{type(module).__name__} holds {_SHIFT} of a prompt with images, which no cache tells: such sessions are not "
                    f"taken. For a prompt of text set its {_SHIFT} to None first, or it will be read at shifted positions"
                )

    def read(self, cache: DynamicCache, tokens: TokenArray, *, chunk: int = 0) -> torch.Tensor:
        """Read tokens, at most `chunk` in a pass (0: all in one); give the logits of the last one, of shape [vocabulary]."""
        self.check()
        device = self._model.get_input_embeddings().weight.device
        logits = torch.empty(0)
        for start in range(0, tokens.size, chunk or tokens.size):
            ids = torch.from_numpy(tokens[start : start + (chunk or tokens.size)].astype(np.int64))[None].to(device)
            with torch.no_grad():
                output = self._model(input_ids=ids, use_cache=True, return_dict=True, **{self.argument: cache}, **self._extra)
            logits = output.logits[0, -1]
        return logits
