"""The structs that llama.cpp takes by value, as they are in build b11549 (xllamacpp 2026.10.11549).

Fields are inserted in the middle of these structs from build to build, so they are good for the pinned build only; the
defaults below, which the library hands out itself, are how another build is noticed before anything is passed to it.
"""

from __future__ import annotations

import ctypes as c
from typing import Any, ClassVar

__all__ = ["CONTEXT_DEFAULTS", "MODEL_DEFAULTS", "SIZES", "Batch", "ContextParams", "ModelParams", "differing"]


class ModelParams(c.Structure):
    """`llama_model_params`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
    ]


class ContextParams(c.Structure):
    """`llama_context_params`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c.c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c.c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c.c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c.c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("moe_cache_size", c.c_size_t),
        *((name, c.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    ]


class Batch(c.Structure):
    """`llama_batch`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


SIZES = {ModelParams: 80, ContextParams: 168, Batch: 56}

MODEL_DEFAULTS: dict[str, Any] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "main_gpu": -1,
    "load_mode": 1,
    "lazy_mode": 0,
    "tensor_split": None,
    "progress_callback": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
}

CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "moe_cache_size": 0,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


def differing(struct: c.Structure, defaults: dict[str, Any]) -> list[str]:
    """Name the fields of a struct that are not what the pinned build's defaults are."""
    return [name for name, value in defaults.items() if getattr(struct, name) != value]
