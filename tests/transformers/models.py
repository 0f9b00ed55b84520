"""Tiny models with random weights, built from configurations: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from kvstore.adapters.transformers import TransformersEngine, weights_digest
from kvstore.ids import TokenArray

logging.set_verbosity_error()  # that optimised kernels are missing: the reference ones are what is tested
torch.set_num_threads(1)  # so that sums are taken in one order, whatever machine the tests run on

VOCABULARY = 97
BLOCK = 16
WINDOW = 12  # of the models that have one; the last WINDOW - 1 rows are kept

_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_SIZE, **_HEADS, "num_hidden_layers": 2},
    "gemma3_text": {
        **_SIZE,
        **_HEADS,
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {**_SIZE, **_HEADS, **_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_SIZE, **_HEADS, **_DELTA},
    "lfm2": {
        **_SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {
        **_SIZE,
        **_HEADS,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
    },
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def model(name: str, dtype: str = "f32", **changes: Any) -> Any:
    """Build a model, once a process, and the same in every process."""
    return _build(name, dtype, **changes)


@cache
def _build(name: str, dtype: str, **changes: Any) -> Any:
    """Its weights are large, so that every row and state shows in what it answers."""
    # tied embeddings would let a random model repeat its last token for ever
    config = AutoConfig.for_model(name, **{**CONFIGS[name], "tie_word_embeddings": False, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in made.parameters():
            if weights.ndim > 1:
                weights.mul_(6)
    return made.to(DTYPES[dtype]).eval()


def engine(name: str, dtype: str = "f32") -> TransformersEngine:
    """Make an engine over a model, with small blocks."""
    made = model(name, dtype)
    return TransformersEngine(made, name=name, weights=weights_digest(made), block_tokens=BLOCK)


def tokens(count: int, seed: int) -> TokenArray:
    """Make up a prompt."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.uint32)


def greedy(running: TransformersEngine, first: int, count: int) -> list[int]:
    """Decode greedily on top of an engine, from a token that is decided on; the last one isn't read any more."""
    chosen = [first]
    while len(chosen) < count:
        chosen.append(int(running.feed([chosen[-1]]).argmax()))
    return chosen
