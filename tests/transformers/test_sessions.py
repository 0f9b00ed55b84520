"""Saving and restoring caches: what a cache that comes back is, and whose it is."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvstore import Store
from kvstore.adapters.transformers import TransformersEngine, TransformersSessions
from kvstore.ids import TokenArray
from tests.support import data_file, flip

from .conftest import Open
from .journeys import hashed
from .models import BLOCK, CONFIGS, WINDOW, engine, model, tokens


def filled(name: str, prompt: TokenArray, dtype: str = "f32") -> TransformersEngine:
    """A model that has read a prompt, on its own cache."""
    running = engine(name, dtype)
    running.feed(prompt)
    return running


def contents(cache: DynamicCache) -> list[dict[str, Any]]:
    """Everything that the layers of a cache hold, tensors as shape, dtype and bits."""
    return [{name: _plain(value) for name, value in vars(layer).items()} | {"": type(layer)} for layer in cache.layers]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return value


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_cache_holds_what_the_saved_one_did(sessions: Open, name: str, dtype: str) -> None:
    """Every attribute of every layer comes back: tensors, flags, counts, windows, devices; found by asking the cache, not the
    adapter."""
    kept = sessions(name, dtype)
    prompt = tokens(BLOCK + WINDOW, 11)
    running = filled(name, prompt, dtype)
    before = contents(running.cache)
    assert kept.save(running.cache, prompt).captured_tokens == prompt.size
    cache, reused = kept.restore(np.append(prompt, 5))
    assert type(cache) is DynamicCache
    assert reused == prompt.size
    assert contents(cache) == before == contents(running.cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_restored_caches_are_independent(sessions: Open, name: str) -> None:
    """Writing on a restored cache, by the model and in place, changes neither the store nor a cache restored before or after."""
    kept = sessions(name)
    prompt = tokens(BLOCK + 3, 12)
    kept.save(filled(name, prompt).cache, prompt)
    first, _ = kept.restore(np.append(prompt, 1))
    second, _ = kept.restore(np.append(prompt, 1))
    untouched = contents(first)
    running = engine(name)
    running.adopt(second, prompt.size)
    running.feed([1, 2, 3])
    for layer in second.layers:
        for tensor in _tensors(vars(layer)):
            tensor.zero_()
        for held in vars(layer).values():
            if isinstance(held, dict):
                held.clear()
    assert contents(first) == untouched
    third, reused = kept.restore(np.append(prompt, 1))
    assert (reused, contents(third)) == (prompt.size, untouched)


def _tensors(held: dict[Any, Any]) -> list[torch.Tensor]:
    inner = [one for value in held.values() for one in (value.values() if isinstance(value, dict) else [value])]
    return [one for one in inner if isinstance(one, torch.Tensor)]


def test_nothing_holds_on_to_a_callers_cache(sessions: Open) -> None:
    """A cache that was saved, or handed out, is gone with its last use by the caller."""
    kept, prompt = sessions("qwen3_next"), tokens(BLOCK + 3, 20)
    running = filled("qwen3_next", prompt)
    kept.save(running.cache, prompt)
    saved = weakref.ref(running.cache)
    running.reset()
    gc.collect()
    assert saved() is None
    cache, reused = kept.restore(np.append(prompt, 1))
    restored = weakref.ref(cache)
    assert reused == prompt.size
    del cache
    gc.collect()
    assert restored() is None


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "mamba2"])
def test_a_saved_cache_may_be_extended_at_once(sessions: Open, name: str) -> None:
    """What a save has taken is what stood there when it was called, though the model overwrites its states before it is written."""
    kept = sessions(name)
    prompt = tokens(BLOCK * 3 + 1, 13)
    running = filled(name, prompt)
    stood = contents(running.cache)
    kept.save(running.cache, prompt)
    running.feed(tokens(9, 14))
    for tensor in (t for layer in running.cache.layers for t in _tensors(vars(layer))):
        tensor.fill_(1)
    cache, _ = kept.restore(np.append(prompt, 1))
    assert contents(cache) == stood


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_an_engine_that_holds_something_else_takes_a_prefix(store: Store, sessions: Open, name: str) -> None:
    """A restore into an engine in the middle of another session leaves nothing of that session behind."""
    prompt = tokens(BLOCK + 5, 15)
    whole = filled(name, prompt)
    kept = sessions(name)
    kept.save(whole.cache, prompt)
    kept.flush()  # what reads it goes past the sessions, which would know what is on its way
    dirty = filled(name, tokens(BLOCK * 3, 16))
    with store.namespace(dirty.layout()).lease(prompt) as lease:
        dirty.apply(lease)
    assert dirty.position == prompt.size
    assert hashed(dirty) == hashed(whole)
    assert torch.equal(dirty.feed([3, 4]), whole.feed([3, 4]))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_the_same_never_matches(sessions: Open, name: str) -> None:
    """A session is found under its own salt, weights, configuration and dtype only; one token less than the prompt at most."""
    prompt = tokens(BLOCK + 1, 17)
    kept = sessions(name, salt=b"lora 1")
    kept.save(filled(name, prompt).cache, prompt)
    kept.flush()
    longer = np.append(prompt, 9)
    assert kept.restore(longer)[1] == prompt.size
    other = model(name, initializer_range=0.03)
    for stranger in (
        sessions(name),
        sessions(name, salt=b"lora 2"),
        sessions(name, salt=b"lora 1", weights="sha256:another"),
        sessions(name, salt=b"lora 1", identity={"kernels": "fla"}),
        sessions(name, "bf16", salt=b"lora 1"),
        sessions(name, salt=b"lora 1", made=other, weights="same"),
        sessions(name, salt=b"lora 1", weights="same"),
    ):
        cache, reused = stranger.restore(longer)
        assert reused == 0
        assert contents(cache) == contents(DynamicCache(config=model(name).config))
    assert kept.restore(prompt)[1] == (0 if kept.layout.states else BLOCK)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gemma3_text", "mamba2"])
def test_a_flipped_byte_is_a_shorter_prefix_or_a_miss(path: Path, name: str) -> None:
    """Damage to any block is never served: what comes back is a shorter prefix, whole, or an empty cache, and it is counted."""
    prompt = tokens(BLOCK * 3 + 2, 18)
    with Store.open(path, max_bytes=64 << 20) as store, _sessions(store, name) as kept:
        running = engine(name)
        for start, stop in ((0, BLOCK + 1), (BLOCK + 1, prompt.size)):
            running.feed(prompt[start:stop])
            kept.save(running.cache, prompt[:stop])
        kept.flush()
        with kept.namespace.lease(prompt) as lease:
            blocks = [(block.file_offset, block.payload_bytes) for block in lease.blocks]
        states = {state.name: running.arrays(running.position)[state.name].tobytes() for state in kept.layout.states}
    stored = data_file(path).read_bytes()
    marks = [[offset + size // 2] for offset, size in blocks if size]
    marks += [[at + len(bits) // 2 for at in _places(stored, bits)] for bits in states.values()]
    assert len(marks) >= len(states) + len(kept.layout.streams[:1])
    seen = set()
    for places in marks:
        data_file(path).write_bytes(stored)
        for place in places:
            flip(data_file(path), place)
        with Store.open(path) as store, _sessions(store, name) as kept:
            cache, reused = kept.restore(np.append(prompt, 1))
            assert kept.stats.fallbacks + kept.stats.promote_misses >= 1
            fresh = engine(name)
            for start, stop in ((0, BLOCK + 1), (BLOCK + 1, prompt.size)):
                if stop <= reused:
                    fresh.feed(prompt[start:stop])
            if kept.layout.states:
                assert reused in (0, BLOCK + 1)
                assert contents(cache) == contents(fresh.cache)
            else:
                assert reused < prompt.size
                assert all(layer.keys is None or layer.keys.shape[2] == reused for layer in cache.layers)
        seen.add(reused)
    assert prompt.size not in seen


def _sessions(store: Store, name: str) -> TransformersSessions:
    return TransformersSessions(store, model(name), name=name, weights="tiny", block_tokens=BLOCK)


def _places(stored: bytes, bits: bytes) -> list[int]:
    """Where a state lies in a file: more than once where pages that a later transaction gave back still hold it."""
    found = [at for at in range(0, len(stored), 64) if stored[at : at + 64] == bits[:64]]
    found = [at for at in found if stored[at : at + len(bits)] == bits]
    assert found
    return found


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_a_cache_that_records_its_past_is_saved_without_it(sessions: Open, name: str) -> None:
    """Rows and columns that a layer keeps for being cropped are left out: the restored cache is the one that never recorded."""
    prompt = tokens(WINDOW + BLOCK, 19)
    plain, recording = engine(name), engine(name)
    recording.cache.activate_past_recording()
    for start, stop in ((0, 20), (20, prompt.size)):
        plain.feed(prompt[start:stop])
        recording.feed(prompt[start:stop])
    assert contents(recording.cache) != contents(plain.cache)
    kept = sessions(name)
    kept.save(recording.cache, prompt)
    cache, reused = kept.restore(np.append(prompt, 1))
    assert reused == prompt.size
    assert contents(cache) == contents(plain.cache)
