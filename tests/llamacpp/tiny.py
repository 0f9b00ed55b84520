"""Tiny models with random weights, one for each kind of state: real GGUF files that llama.cpp loads and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY = 256
WINDOW = 64
_CONTEXT = 4096
_WIDTH, _INNER, _HEADS, _KV_HEADS, _HEAD = 128, 256, 4, 2, 32
_EPSILON = 1e-5


@dataclass
class _Draft:
    """A model before it is written: tensors by name, each with its shape as ggml counts, the fastest axis first."""

    architecture: str
    blocks: int
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def block(self, index: int, **shapes: tuple[int, ...]) -> None:
        """Add weights of a block; two underscores in a name stand for a dot."""
        for name, shape in shapes.items():
            self.tensors[f"blk.{index}.{name.replace('__', '.')}"] = shape

    def attention(self, index: int, *, queries: int = 1) -> None:
        """Add grouped-query attention with normalised heads; some models have `queries` times the query's width (a gate)."""
        self.block(
            index,
            attn_q__weight=(_WIDTH, queries * _HEADS * _HEAD),
            attn_k__weight=(_WIDTH, _KV_HEADS * _HEAD),
            attn_v__weight=(_WIDTH, _KV_HEADS * _HEAD),
            attn_output__weight=(_HEADS * _HEAD, _WIDTH),
            attn_q_norm__weight=(_HEAD,),
            attn_k_norm__weight=(_HEAD,),
        )

    def feed_forward(self, index: int, *, norm: str | None = "ffn_norm") -> None:
        """Add a gated feed-forward part, and the norm before it."""
        self.block(index, ffn_gate__weight=(_WIDTH, _INNER), ffn_up__weight=(_WIDTH, _INNER), ffn_down__weight=(_INNER, _WIDTH))
        if norm is not None:
            self.block(index, **{f"{norm}__weight": (_WIDTH,)})

    def write(self, path: Path) -> None:
        """Draw the weights (always the same ones) and write the file."""
        writer = gguf.GGUFWriter(str(path), self.architecture)
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(VOCABULARY)
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(_WIDTH)
        writer.add_block_count(self.blocks)
        writer.add_layer_norm_rms_eps(_EPSILON)
        for key, value in self.values.items():
            name = f"{self.architecture}.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        chance = np.random.default_rng(len(self.tensors))
        self.tensors["token_embd.weight"] = (_WIDTH, VOCABULARY)
        for name, shape in self.tensors.items():
            writer.add_tensor(name, _weights(name, shape, chance))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _weights(name: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw one tensor: norms are one, decay is negative, the rest keeps the size of what goes through it."""
    drawn = chance.standard_normal(shape[::-1], np.float32)
    if name.endswith("norm.weight"):
        return np.ones(shape[::-1], np.float32)
    if name.endswith(".ssm_a"):
        return -np.exp(drawn / 4)
    return drawn if name == "token_embd.weight" else drawn / np.float32(np.sqrt(shape[0]))


def _attentive(architecture: str, blocks: int, **values: Any) -> _Draft:
    """Begin a model with attention."""
    common = {
        "feed_forward_length": _INNER,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "rope.dimension_count": _HEAD,
        "rope.freq_base": 10000.0,
    }
    return _Draft(architecture, blocks, {**common, **{key.replace("__", "."): value for key, value in values.items()}})


def _lfm2(*, window: int = 0) -> _Draft:
    """Short convolutions and attention in turns."""
    draft = _attentive("lfm2", 4, attention__head_count_kv=[0, _KV_HEADS, 0, _KV_HEADS], shortconv__l_cache=3)
    if window:
        draft.values["attention.sliding_window"] = window
    draft.tensors["token_embd_norm.weight"] = (_WIDTH,)
    for index in range(draft.blocks):
        draft.block(index, attn_norm__weight=(_WIDTH,))
        draft.feed_forward(index)
        if index % 2:
            draft.attention(index)
        else:
            draft.block(
                index,
                shortconv__conv__weight=(3, _WIDTH),
                shortconv__in_proj__weight=(_WIDTH, 3 * _WIDTH),
                shortconv__out_proj__weight=(_WIDTH, _WIDTH),
            )
    return draft


def _qwen35() -> _Draft:
    """Three gated delta nets, then attention with M-RoPE."""
    size, groups, heads = 32, 2, 4
    keys, values = size * groups, size * heads
    draft = _attentive(
        "qwen35",
        4,
        rope__dimension_sections=[6, 5, 5, 0],
        ssm__conv_kernel=4,
        ssm__inner_size=values,
        ssm__state_size=size,
        ssm__time_step_rank=heads,
        ssm__group_count=groups,
        full_attention_interval=4,
    )
    draft.tensors["output_norm.weight"] = (_WIDTH,)
    for index in range(draft.blocks):
        draft.block(index, attn_norm__weight=(_WIDTH,), post_attention_norm__weight=(_WIDTH,))
        draft.feed_forward(index, norm=None)
        if index == 3:
            draft.attention(index, queries=2)
            continue
        draft.block(
            index,
            attn_qkv__weight=(_WIDTH, 2 * keys + values),
            attn_gate__weight=(_WIDTH, values),
            ssm_conv1d__weight=(4, 2 * keys + values),
            ssm_dt__bias=(heads,),
            ssm_a=(heads,),
            ssm_beta__weight=(_WIDTH, heads),
            ssm_alpha__weight=(_WIDTH, heads),
            ssm_norm__weight=(size,),
            ssm_out__weight=(values, _WIDTH),
        )
    return draft


def _gemma3() -> _Draft:
    """Five layers with a window, then one that sees everything."""
    draft = _attentive("gemma3", 6, attention__sliding_window=WINDOW)
    draft.tensors["output_norm.weight"] = (_WIDTH,)
    for index in range(draft.blocks):
        draft.block(index, attn_norm__weight=(_WIDTH,), post_attention_norm__weight=(_WIDTH,), post_ffw_norm__weight=(_WIDTH,))
        draft.feed_forward(index)
        draft.attention(index)
    return draft


def _qwen3() -> _Draft:
    """Attention alone."""
    draft = _attentive("qwen3", 2)
    draft.tensors["output_norm.weight"] = (_WIDTH,)
    for index in range(draft.blocks):
        draft.block(index, attn_norm__weight=(_WIDTH,))
        draft.feed_forward(index)
        draft.attention(index)
    return draft


def _mamba() -> _Draft:
    """Recurrent layers alone."""
    inner, size, rank, kernel = 2 * _WIDTH, 16, 8, 4
    draft = _Draft(
        "mamba",
        3,
        {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "ssm.conv_kernel": kernel,
            "ssm.inner_size": inner,
            "ssm.state_size": size,
            "ssm.time_step_rank": rank,
        },
    )
    draft.tensors["output_norm.weight"] = (_WIDTH,)
    for index in range(draft.blocks):
        draft.block(
            index,
            attn_norm__weight=(_WIDTH,),
            ssm_in__weight=(_WIDTH, 2 * inner),
            ssm_conv1d__weight=(kernel, inner),
            ssm_conv1d__bias=(inner,),
            ssm_x__weight=(inner, rank + 2 * size),
            ssm_dt__weight=(rank, inner),
            ssm_dt__bias=(inner,),
            ssm_a=(size, inner),
            ssm_d=(inner,),
            ssm_out__weight=(inner, _WIDTH),
        )
    return draft


MODELS: dict[str, Callable[[], _Draft]] = {
    "qwen3": _qwen3,
    "lfm2": _lfm2,
    "lfm2-window": lambda: _lfm2(window=WINDOW),
    "qwen35": _qwen35,
    "gemma3": _gemma3,
    "mamba": _mamba,
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write a file for each of `MODELS`, and return where."""
    paths = {name: folder / f"{name}.gguf" for name in MODELS}
    for name, path in paths.items():
        MODELS[name]().write(path)
    return paths
