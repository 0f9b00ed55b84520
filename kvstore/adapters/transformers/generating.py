"""What stands between a store and `model.generate`: which calls can be resumed, and what the model reads first of all."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import ArrayError, EngineError

__all__ = ["Generated", "check_call", "one_sequence", "only_new"]

# Arguments of `generate` that change neither the prompt's tokens nor what the model makes of them
_HARMLESS = {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "use_model_defaults",
}


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What a generation gave.

    Attributes
    ----------
    sequences : LongTensor[1, tokens]
        The prompt and what was generated.
    reused : int
        Tokens of the prompt that were restored.
    output : object
        What `model.generate` returned.
    """

    sequences: torch.Tensor
    reused: int
    output: Any


def one_sequence(input_ids: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Bring a prompt into the form [1, tokens], on the model's device.

    Raises
    ------
    ArrayError
        When it isn't one sequence of at least one token.
    """
    ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ArrayError(f"expected one sequence of token ids, [tokens] or [1, tokens], got shape {tuple(input_ids.shape)}")
    any_model: Any = model
    return ids.to(any_model.device)


def check_call(model: torch.nn.Module, length: int, arguments: Mapping[str, Any]) -> Any:
    """Refuse a call whose cache would not be that of the tokens alone; give the generation's effective settings.

    Raises
    ------
    EngineError
        Names the argument: beams and assistants (several sequences, or cropped ones), padding, and whatever the model is
        given beside tokens (images, embeddings), since a prompt is known by its tokens.
    """
    any_model: Any = model
    given = dict(arguments)
    mask = given.pop("attention_mask", None)
    if mask is not None and (tuple(mask.shape) not in ((1, length), (length,)) or not bool((mask == 1).all())):
        raise EngineError("attention_mask must be all ones: padding would be part of the state, and isn't part of the tokens")
    settings = copy.deepcopy(given.get("generation_config") or any_model.generation_config)
    rest = settings.update(**{name: value for name, value in given.items() if name != "generation_config"})
    unknown = sorted(name for name in rest if name not in _HARMLESS and rest[name] is not None)
    if unknown:
        raise EngineError(
            f"{unknown} are no arguments of this generate: a prompt is known by its tokens, and what else the model reads would be "
            "part of its state (images enter as ids, see kvstore.image_tokens, with an engine of your own)"
        )
    mode = settings.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise EngineError(f"generation mode {str(getattr(mode, 'value', mode))!r} isn't taken: greedy search and sampling are")
    for name, fits in (
        ("num_return_sequences", (None, 1)),
        ("cache_implementation", (None, "dynamic", "hybrid")),
        ("use_cache", (None, True)),
    ):
        if getattr(settings, name, None) not in fits:
            raise EngineError(f"{name}={getattr(settings, name)!r} isn't taken: one sequence is generated, on a dynamic cache")
    return settings


@contextmanager
def only_new(model: torch.nn.Module, length: int, position: int) -> Iterator[None]:
    """Let the first forward pass of a generation read what isn't in the cache, and no more.

    Transformers sees to that by itself where a cache knows its length. One of recurrent layers alone doesn't, and there it would
    read the whole prompt once more, on top of states that have seen it.

    Parameters
    ----------
    model : torch.nn.Module
        The decoder itself, whose `forward` is called.
    length, position : int
        Tokens of the prompt, and how many of them the cache has seen.

    Raises
    ------
    EngineError
        When nothing was read through the decoder's own call, or something else than the tokens that are new, so that it isn't
        known what the cache is of.
    """
    first, read = True, 0

    def shorten(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal first, read
        ids = given.get("input_ids")
        if first and position and ids is not None and ids.shape[-1] == length:
            for name in ("input_ids", "attention_mask", "position_ids"):
                if isinstance(given.get(name), torch.Tensor) and given[name].shape[-1] == length:
                    given[name] = given[name][..., position:]
        if first:
            read = 0 if given.get("input_ids") is None else given["input_ids"].shape[-1]
        first = False
        return args, given

    handle = model.register_forward_pre_hook(shorten, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if first:
        raise EngineError(f"the generation went past the forward pass of {type(model).__name__}; what it has read isn't known")
    if read != length - position:
        raise EngineError(
            f"the generation began by reading {read} tokens, expected the {length - position} behind position {position}: "
            "the cache isn't that of the sequence"
        )
