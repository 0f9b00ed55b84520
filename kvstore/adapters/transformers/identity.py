"""What names a model in one configuration: everything that changes the bytes of its cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from blake3 import blake3

from kvstore.errors import LayoutError

__all__ = ["model_identity", "weights_digest"]

# Fields of a configuration that name, describe or ask for output; the version stands in the identity by itself
_NEUTRAL = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}


def weights_digest(model: torch.nn.Module) -> str:
    """Hash a model's parameters and persistent buffers: names, dtypes, shapes and bytes, in order of name.

    Reads all weights once (BLAKE3: about the speed of memory on several cores). Where weights come from a file whose digest is
    known, that digest serves as well. The matrices of a LoRA that was loaded into the model are part of it. Its scaling and
    whether it is switched on are not: they belong into the salt.

    Returns
    -------
    str
        "blake3:" and 64 hexadecimal digits.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        if tensor.numel():
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return "blake3:" + hasher.hexdigest()


def model_identity(model: torch.nn.Module, *, weights: str, given: Mapping[str, str | int]) -> dict[str, str | int]:
    """Name a model: weights, configuration, implementation, versions, kind of device, and what the caller adds.

    Raises
    ------
    LayoutError
        When `weights` is empty, or the caller names something that is found out here.
    """
    if not weights:
        raise LayoutError("weights must be a digest of the model's weights, e.g. weights_digest(model) or the file's SHA-256")
    config: Any = model.config
    kept = {name: value for name, value in json.loads(config.to_json_string(use_diff=False)).items() if name not in _NEUTRAL}
    any_model: Any = model
    found: dict[str, str | int] = {
        "weights": weights,
        "class": type(model).__name__,
        "config": blake3(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        "dtype": str(any_model.dtype),
        "attention": _implementation(config, "_attn_implementation"),
        "experts": _implementation(config, "_experts_implementation"),
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "device": str(any_model.device.type),
        "float32_products": _products(any_model.device.type),
    }
    twice = sorted(set(found) & set(given))
    if twice:
        raise LayoutError(f"{twice} are found out from the model itself; give other keys in identity")
    return {**found, **given}


def _implementation(config: Any, attribute: str) -> str:
    """Say which implementation a configuration and those in it name; they may differ, and their JSON doesn't hold it."""
    inner = {name: getattr(config, name, None) for name in sorted(getattr(config, "sub_configs", None) or {})}
    named = [f"{name}={_implementation(one, attribute)}" for name, one in inner.items() if one is not None]
    return " ".join([str(getattr(config, attribute, None)), *named])


def _products(device: str) -> str:
    """Say in which precision PyTorch multiplies float32: a setting of the process, which may take bfloat16 or TF32 instead."""
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    # each backend has its own since PyTorch 2.9, where asking for that of all may be an error
    own = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if own is None:
        return str(torch.get_float32_matmul_precision())
    return "ieee" if own == "none" else str(own)  # "none": nobody has set it
