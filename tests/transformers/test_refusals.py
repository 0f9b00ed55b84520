"""What the adapter doesn't take is refused by name, before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DynamicCache, EncoderDecoderCache, StaticCache, cache_utils

from kvstore.adapters.transformers import TransformersEngine, weights_digest
from kvstore.adapters.transformers.identity import model_identity
from kvstore.adapters.transformers.layers import cut, learn_layer
from kvstore.adapters.transformers.tensors import view_of
from kvstore.errors import ArrayError, EngineError, KVStoreError, LayoutError, TokensError
from tests.support import run_child

from .conftest import Open
from .models import BLOCK, CONFIGS, engine, model, tokens

_Derived: Any = type("_Derived", (DynamicCache,), {})  # as MtpCache and others: more than its base, or something else by it


def _two(name: str) -> DynamicCache:
    cache = DynamicCache(config=model(name).config)
    made = engine(name)
    made.reader._model(input_ids=torch.ones((2, 20), dtype=torch.int64), use_cache=True, **{made.reader.argument: cache})
    return cache


def _changed(name: str, change: Callable[[Any], object]) -> DynamicCache:
    running = engine(name)
    running.feed(tokens(20, 1))
    change(running.cache)
    return running.cache


CACHES: dict[str, tuple[str, Callable[[], object], str]] = {
    "two sequences": ("qwen3", lambda: _two("qwen3"), "holds 2 sequences"),
    "two sequences of states": ("mamba2", lambda: _two("mamba2"), "holds 2 sequences"),
    "static": ("qwen3", lambda: StaticCache(config=model("qwen3").config, max_cache_len=32), "got a StaticCache"),
    "encoder-decoder": ("qwen3", lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "got a EncoderDecoderCache"),
    "derived": ("qwen3", lambda: _Derived(config=model("qwen3").config), "got a _Derived"),
    "no cache": ("qwen3", lambda: None, "got a NoneType"),
    "without tokens": ("qwen3", lambda: DynamicCache(config=model("qwen3").config), "holds nothing"),
    "without layers": ("qwen3", lambda: DynamicCache(), "0 layers"),
    "of another kind": ("gemma3_text", lambda: _full("gemma3_text"), "DynamicCache\\(config=model.config\\)"),
    "of another dtype": ("qwen3", lambda: _of("qwen3", "bf16"), "bfloat16"),
    "offloading": ("qwen3", lambda: _changed("qwen3", lambda cache: setattr(cache, "offloading", True)), "offloads"),
    "a new attribute of the cache": (
        "qwen3",
        lambda: _changed("qwen3", lambda cache: setattr(cache, "pages", [])),
        "doesn't know what \\['pages'\\]",
    ),
    "a new tensor": (
        "qwen3",
        lambda: _changed("qwen3", lambda cache: setattr(cache.layers[1], "scales", torch.ones(3))),
        "layer 1.*doesn't know what scales is",
    ),
    "a new flag": (
        "qwen3",
        lambda: _changed("qwen3", lambda cache: setattr(cache.layers[0], "rotated", True)),
        "rotated is True",
    ),
    "a flag that differs": (
        "qwen3_next",
        lambda: _changed("qwen3_next", lambda cache: cache.layers[0].has_previous_state.update({0: False})),
        "has_previous_state",
    ),
    "a second state": (
        "qwen3_next",
        lambda: _changed("qwen3_next", lambda cache: cache.layers[0].conv_states.update({1: torch.ones(1, 2, 3)})),
        "conv_states holds a state",
    ),
    "a state that is missing": (
        "lfm2",
        lambda: _changed("lfm2", lambda cache: cache.layers[0].conv_states.update({0: None})),
        "conv.0.0: the cache holds nothing",
    ),
    "a window cut short": (
        "gemma3_text",
        lambda: _changed("gemma3_text", lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys[:, :, 1:])),
        "window_k.0: the cache holds shape",
    ),
    "a window too long": (
        "gemma3_text",
        lambda: _changed("gemma3_text", lambda cache: setattr(cache.layers[0], "keys", torch.zeros(1, 2, 12, 8))),
        "window_k.0: the cache holds shape",
    ),
    "a count that differs": (
        "gemma3_text",
        lambda: _changed("gemma3_text", lambda cache: setattr(cache.layers[0], "cumulative_length", 19)),
        "layer 0 has seen 19 tokens",
    ),
}


def _full(name: str) -> DynamicCache:
    made, cache = engine(name), DynamicCache()
    made.reader.read(cache, tokens(20, 1))
    return cache


def _of(name: str, dtype: str) -> DynamicCache:
    running = engine(name, dtype)
    running.feed(tokens(20, 1))
    return running.cache


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_of_another_kind_is_refused(sessions: Open, case: str) -> None:
    """Saving what isn't one sequence in the model's own kind of cache raises and says what was found, also if its tokens are
    stored already; nothing is saved."""
    name, make, says = CACHES[case]
    kept = sessions(name)
    with pytest.raises(ArrayError, match=says):
        kept.save(make(), tokens(20, 1))
    assert kept.restore(tokens(21, 1))[1] == 0
    running = engine(name)
    running.feed(tokens(20, 1))
    kept.save(running.cache, tokens(20, 1))
    with pytest.raises(ArrayError, match=says):
        kept.save(make(), tokens(20, 1))


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text", "falcon_h1"])
def test_recurrent_states_of_a_cropped_cache_are_refused(sessions: Open, name: str) -> None:
    """Cropping leaves recurrent states at the position before it: no cache that can be cropped is saved with them."""
    kept, running = sessions(name), engine(name)
    running.cache.activate_past_recording()
    running.feed(tokens(20, 1))
    running.cache.crop(-3)
    with pytest.raises(ArrayError, match="layer 0 records its past"):
        kept.save(running.cache, tokens(17, 1))
    assert kept.restore(tokens(18, 1))[1] == 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "mamba2"])
def test_tokens_that_the_cache_has_not_seen_are_refused(sessions: Open, name: str) -> None:
    """A cache is saved at exactly the tokens it has seen: one more or less raises."""
    kept = sessions(name)
    running = engine(name)
    running.feed(tokens(20, 1))
    for count in (19, 21):
        with pytest.raises(ArrayError, match=f"{count} tokens"):
            kept.save(running.cache, tokens(count, 1))
    with pytest.raises(TokensError):
        kept.save(running.cache, [])
    with pytest.raises(TokensError):
        kept.restore([])


def test_positions_that_were_not_computed_are_refused() -> None:
    """An engine hands out what it has computed, and nothing else."""
    running = engine("qwen3_next")
    running.feed(tokens(20, 1))
    for start, stop in ((0, 21), (16, 16), (-1, 4)):
        with pytest.raises(EngineError, match="stands at 20"):
            running.capture(start, stop)
    with pytest.raises(EngineError, match="stands at 20"):
        running.arrays(19)
    assert running.capture(0, 16).states == {}
    with pytest.raises(EngineError, match="chunk"):
        running.feed([1], chunk=-1)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("t5", "encoder-decoder"),
        ("deepseek_v4", "DeepseekV4"),
        ("recurrent_gemma", "nothing into layer 0.*keeps that layer's state elsewhere"),
        ("xlstm", "has a cache of its own"),
        ("rwkv", "takes no cache"),
        ("window", "keeps no rows"),
        ("training", "call model.eval"),
    ],
)
def test_models_that_are_not_taken_are_named(kind: str, says: str) -> None:
    """A model whose state is of another kind, or changes from run to run, is refused when the engine is made."""
    with pytest.raises(KVStoreError, match=says):
        TransformersEngine(_unfit(kind), name=kind, weights="none")


def _unfit(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

    if kind == "t5":
        return T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()
    if kind == "deepseek_v4":
        config = AutoConfig.for_model(
            "deepseek_v4",
            vocab_size=97,
            hidden_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=16,
            qk_rope_head_dim=8,
            q_lora_rank=16,
            o_lora_rank=8,
            o_groups=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            index_n_heads=2,
            index_head_dim=8,
        )
        return AutoModelForCausalLM.from_config(config).eval()
    own = {
        "recurrent_gemma": {"num_attention_heads": 4, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 12},
        "xlstm": {"num_heads": 2, "num_hidden_layers": 1},
        "rwkv": {"attention_hidden_size": 32, "num_hidden_layers": 2},
    }
    if kind in own:
        config = AutoConfig.for_model(kind, vocab_size=97, hidden_size=32, pad_token_id=0, **own[kind])
        return AutoModelForCausalLM.from_config(config).eval()
    if kind == "window":
        return model("gemma3_text", sliding_window=1)
    config = AutoConfig.for_model("qwen3", **CONFIGS["qwen3"])
    return AutoModelForCausalLM.from_config(config).train()


def test_a_prompt_with_images_is_refused(sessions: Open) -> None:
    """A model that holds the shifted positions of images, which its cache doesn't tell, reads, saves and generates nothing."""
    inner = model("qwen3_5_text").model
    inner.rope_deltas = torch.zeros(1, 1, dtype=torch.int64)  # as after a prompt of text
    try:
        kept = sessions("qwen3_5_text", salt=b"images")
        running = engine("qwen3_5_text")
        running.feed(tokens(20, 1))
        inner.rope_deltas -= 5
        for act in (
            lambda: running.feed([1]),
            lambda: running.capture(0, 20),
            lambda: kept.save(running.cache, tokens(20, 1)),
            lambda: kept.generate(torch.ones(1, 20, dtype=torch.int64)),
        ):
            with pytest.raises(EngineError, match="rope_deltas"):
                act()
        inner.rope_deltas = None
        assert kept.save(running.cache, tokens(20, 1)).captured_tokens == 20
    finally:
        del inner.rope_deltas


def test_a_model_that_trains_is_refused(sessions: Open) -> None:
    """A model that is put into training mode later on reads, saves and generates nothing until it is out of it."""
    made = model("qwen3", attention_dropout=0.5)
    kept = sessions("qwen3", made=made)
    running = TransformersEngine(made, name="qwen3", weights=weights_digest(made), block_tokens=BLOCK)
    running.feed(tokens(20, 1))
    made.train()
    try:
        for act in (
            lambda: running.feed([1]),
            lambda: running.capture(0, 20),
            lambda: kept.save(running.cache, tokens(20, 1)),
            lambda: kept.generate(torch.ones(1, 20, dtype=torch.int64), max_new_tokens=2),
        ):
            with pytest.raises(EngineError, match="training mode"):
                act()
    finally:
        made.eval()
    assert kept.stats.cascades == 0
    assert kept.save(running.cache, tokens(20, 1)).captured_tokens == 20


@pytest.mark.parametrize("name", ["mamba2", "qwen3"])
def test_a_pass_that_fails_leaves_nothing_to_hand_out(name: str) -> None:
    """When the model raises in the middle of reading, what its cache holds by then is no state of any position: it is gone."""
    running, left = engine(name), [4]

    def fail(module: torch.nn.Module, args: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory")

    running.feed(tokens(20, 1))
    layer = next(module for module in running.reader.decoder.modules() if isinstance(module, torch.nn.ModuleList))[-1]
    hook = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            running.feed(tokens(40, 2), chunk=10)
    finally:
        hook.remove()
    with pytest.raises(EngineError, match="stands at 0"):
        running.capture(0, 20)
    running.feed(tokens(20, 1))
    whole = engine(name)
    whole.feed(tokens(20, 1))
    assert all(np.array_equal(array, whole.arrays(20)[key]) for key, array in running.arrays(20).items())


def test_an_identity_is_what_it_says() -> None:
    """Weights have to be named, and what is found out from the model can't be given; a digest depends on every weight."""
    made = model("qwen3")
    with pytest.raises(LayoutError, match="weights"):
        TransformersEngine(made, name="m", weights="")
    with pytest.raises(LayoutError, match="'torch'"):
        TransformersEngine(made, name="m", weights="w", identity={"torch": "2"})
    identity = dict(engine("qwen3").layout().identity)
    assert {"weights", "config", "dtype", "attention", "transformers", "torch", "device", "class"} <= set(identity)
    before = weights_digest(made)
    assert before == weights_digest(made)
    weights = made.lm_head.weight.data
    kept = weights[5, 3].clone()
    weights[5, 3] += 1
    assert weights_digest(made) != before
    weights[5, 3] = kept
    assert weights_digest(made) == before
    assert weights_digest(model("qwen3", "bf16")) != before


def test_an_identity_tells_the_implementations_inside() -> None:
    """A configuration with others inside names the attention of each: they may differ, and change the bytes."""
    made = model("qwen3")
    config = AutoConfig.for_model("gemma3", text_config=CONFIGS["gemma3_text"])
    config._attn_implementation = "eager"
    shell = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))
    seen = []
    for implementation in ("eager", "sdpa"):
        config.text_config._attn_implementation = implementation
        seen.append(model_identity(cast("torch.nn.Module", shell), weights="w", given={}))
    assert [key for key in seen[0] if seen[0][key] != seen[1][key]] == ["attention"]
    before = model_identity(made, weights="w", given={})
    made.set_attn_implementation("eager")
    assert model_identity(made, weights="w", given={}) != before
    made.set_attn_implementation("sdpa")
    assert model_identity(made, weights="w", given={}) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_identity_tells_the_precision_of_products(device: str) -> None:
    """What PyTorch multiplies float32 in is a setting of the process that changes the bytes: another one is another layout."""
    shell = cast("torch.nn.Module", SimpleNamespace(config=model("qwen3").config, dtype=torch.float32, device=torch.device(device)))
    usual, unset = torch.get_float32_matmul_precision(), model_identity(shell, weights="w", given={})
    torch.set_float32_matmul_precision("highest")
    exact = model_identity(shell, weights="w", given={})
    try:
        torch.set_float32_matmul_precision("medium")
        rough = model_identity(shell, weights="w", given={})
    finally:
        torch.set_float32_matmul_precision(usual)
    assert [key for key in exact if exact[key] != rough[key]] == ["float32_products"]
    assert unset == exact


def test_states_may_be_tensors_or_dicts_of_them() -> None:
    """A linear layer of Transformers 5.12, whose states are tensors and whose flags are bools, is taken as one with dicts is."""
    running = engine("qwen3_next")
    running.feed([0])
    new = running.cache.layers[0]
    old = cache_utils.LinearAttentionLayer()
    _as_in_5_12(old, new.conv_states[0], new.recurrent_states[0])
    form, plain = learn_layer(old, 0), learn_layer(new, 0)
    assert [part.name for part in form.parts] == [part.name for part in plain.parts] == ["conv.0.0", "recurrent.0.0"]
    assert [part.state() for part in form.parts] == [part.state() for part in plain.parts]
    empty = cache_utils.LinearAttentionLayer()
    _as_in_5_12(empty, None, None)
    tensors = {part.name: cut(part, _held(part, old), 0, 1).clone() for part in form.parts}
    form.fill(empty, 1, tensors)
    form.check(empty, 0, 1)
    assert np.array_equal(view_of(empty.conv_states), view_of(new.conv_states[0]))
    assert np.array_equal(view_of(empty.recurrent_states), view_of(new.recurrent_states[0]))
    assert (empty.has_previous_state, empty.is_conv_states_initialized, empty.conv_kernel_size) == (True, True, 4)


def _held(part: Any, layer: object) -> torch.Tensor:
    tensor = part.of(layer)
    assert tensor is not None
    return tensor


def _as_in_5_12(layer: Any, conv: Any, recurrent: Any) -> None:
    for name in list(vars(layer)):
        delattr(layer, name)
    there = conv is not None
    layer.conv_states, layer.recurrent_states = conv, recurrent
    layer.is_conv_states_initialized = layer.is_recurrent_states_initialized = layer.has_previous_state = there
    if there:
        layer.dtype, layer.device, layer.max_batch_size, layer.conv_kernel_size = conv.dtype, conv.device, 1, conv.shape[-1]


def test_importing_the_adapters_imports_no_torch() -> None:
    """torch and transformers come with this adapter's own package only."""
    code = """
    import subprocess
    look = "import sys, kvstore.adapters; print({'torch', 'transformers'} & set(sys.modules))"
    print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip())
    """
    assert run_child(code, "-") == "set()"


def test_a_prefix_is_cut_where_blocks_are(sessions: Open) -> None:
    """With full attention alone any number of tokens may be restored, also in the middle of a block."""
    kept = sessions("qwen3")
    prompt = tokens(BLOCK * 2 + 5, 2)
    running = engine("qwen3")
    running.feed(prompt)
    kept.save(running.cache, prompt)
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, prompt.size):
        cache, reused = kept.restore(np.append(prompt[:length], 96))
        assert reused == length
        for layer, whole in zip(cache.layers, running.cache.layers, strict=True):
            assert torch.equal(layer.keys, whole.keys[:, :, :length])
            assert torch.equal(layer.values, whole.values[:, :, :length])
