"""Conversations of the synthetic hybrid: each checkpoint is restored bit for bit, and nothing matches across what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import CheckpointPolicy, SessionTier, Store, image_tokens
from kvstore.ids import TokenArray
from kvstore.testing import Conversation, SyntheticHybrid, serve
from kvstore.testing.hybrid import KVFormat
from tests.store.index import checkpoints_on
from tests.support import assert_sound

from .drivers import made_up


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Make a store; it has to be sound in the end."""
    with Store.open(tmp_path / "s", max_bytes=128 << 20) as opened:
        yield opened
        assert_sound(opened)


def assert_restores(store: Store, live: SyntheticHybrid, kv: KVFormat, tokens: TokenArray, *, seed: int = 0) -> TokenArray:
    """Restore a session at its end in a fresh engine, which has to hold and to say what an uninterrupted one does.

    `live` has read the tokens; it is left 16 tokens further, which are returned.
    """
    fresh = SyntheticHybrid(kv)
    with SessionTier(store, fresh) as tier:
        assert tier.promote(np.append(tokens, np.uint32(0))) == tokens.size
    for _ in range(2):
        expected, seen = live.state_hash(), fresh.state_hash()
        assert seen == expected, seen.differing(expected)
        if live.position > tokens.size:
            break
        decoded = live.decode(16, seed=seed)
        assert fresh.decode(16, seed=seed).tolist() == decoded.tolist()
    return decoded


def checkpoints(store: Store, kv: KVFormat, tokens: TokenArray) -> list[int]:
    """Where a session can be restored, as far as its index says."""
    return checkpoints_on(store.namespace(SyntheticHybrid(kv).layout()), tokens.tolist())


@pytest.mark.parametrize(("kv", "turns", "drop"), [("int8", 30, False), ("int8", 30, True), ("int4", 12, False), ("f16", 12, True)])
def test_every_checkpoint_of_a_conversation(store: Store, kv: KVFormat, turns: int, drop: bool) -> None:
    """In a conversation with branches each checkpoint restores bit for bit when it is made, and in the end each that is left.

    Where the answers stay that the client leaves out, each of their branches keeps a checkpoint to come back to.
    """
    client, engine = Conversation(seed=11), SyntheticHybrid(kv)
    kinds: Counter[str] = Counter()
    paths: list[TokenArray] = []
    with SessionTier(store, engine, checkpoints=CheckpointPolicy(drop_answers=drop)) as tier:
        for turn in range(turns):
            kind, prompt = client.request()
            kinds[kind] += 1
            reply = serve(tier, engine, prompt, seed=turn)
            tier.flush()
            if kind == "ask" and turn:  # the last turn's boundary: all of it but the reasoning and the answer, which come anew
                assert reply.reused == paths[-1].size - reply.reasoning.size - reply.answer.size
            live = SyntheticHybrid(kv)
            live.feed(prompt)
            assert assert_restores(store, live, kv, prompt, seed=turn).tolist() == reply.reasoning.tolist()
            assert live.decode(12, seed=turn).tolist() == reply.answer.tolist()
            assert engine.state_hash() == live.state_hash()
            assert_restores(store, live, kv, reply.everything)
            client.receive(reply.answer)
            paths.append(reply.everything)
        assert tier.stats.faults == tier.stats.save_misses == tier.stats.fallbacks == 0
        assert tier.stats.promoted == turns - 1 if not drop else tier.stats.promoted >= kinds["ask"] - 1
        assert bool(tier.stats.dropped_answers) == drop
    assert min(kinds["ask"], kinds["regenerate"], kinds["edit"]) >= turns // 10
    left = {path[:position].tobytes(): path[:position] for path in paths for position in checkpoints(store, kv, path)}
    assert len(left) >= (turns if not drop else 2)
    for tokens in left.values():
        live = SyntheticHybrid(kv)
        live.feed(tokens)
        assert_restores(store, live, kv, tokens)


def test_the_reasoning_is_never_matched(store: Store) -> None:
    """A prompt with all of it, as a tool's loop sends, goes on at the end; one without the reasoning at the turn's boundary."""
    engine = SyntheticHybrid()
    with SessionTier(store, engine) as tier:
        first = serve(tier, engine, made_up(90, 1))
        shown = np.concatenate([first.prompt, first.answer, made_up(10, 2)])
        assert tier.promote(np.concatenate([first.everything, made_up(5, 3)])) == first.everything.size
        assert serve(tier, engine, shown).reused == 90


def test_images_never_match_across_each_other(store: Store) -> None:
    """A prompt that differs in an image's digest alone is restored up to the image at most."""
    head, tail = made_up(70, 1), made_up(40, 2)
    prompts = {digest: np.concatenate([head, image_tokens(digest, 30), tail]) for digest in (b"a" * 32, b"a" * 31 + b"b")}
    one, other = prompts.values()
    engine = SyntheticHybrid()
    with SessionTier(store, engine) as tier:
        engine.feed(head)
        tier.cascade(head)
        engine.feed(one[70:])
        tier.cascade(one)
        assert tier.promote(np.append(other, 1)) == 70
        engine.feed(other[70:])
        live = SyntheticHybrid()
        live.feed(other)
        assert engine.state_hash() == live.state_hash()
        tier.cascade(other)
        assert tier.promote(np.append(other, 1)) == tier.promote(np.append(one, 1)) == 140
        live.feed([5])
        live.reset()
        live.feed(one)
        assert engine.state_hash() == live.state_hash()


VARIANTS: dict[str, dict[str, bytes]] = {
    "plain": {},
    "lora": {"lora": b"weights of a"},
    "another lora": {"lora": b"weights of b"},
    "control": {"control": b"weights of a"},
    "both": {"lora": b"weights of a", "control": b"weights of a"},
}


def test_loras_and_control_vectors_never_match_across_each_other(store: Store) -> None:
    """What was saved under one LoRA and control vector isn't found under any other, and is bit-exact under its own."""
    tokens = made_up(100, 1)
    for name in VARIANTS:
        engine = SyntheticHybrid(**VARIANTS[name])  # type: ignore[arg-type]  # the keywords are those of the two bytes
        with SessionTier(store, engine, salt=engine.salt) as tier:
            assert tier.promote(np.append(tokens, 1)) == 0, name
            engine.feed(tokens)
            tier.cascade(tokens)
            tier.flush()
            hashed = engine.state_hash()
            engine.scribble()
            assert tier.promote(np.append(tokens, 1)) == 100, name
            assert engine.state_hash() == hashed
    assert store.stats().namespaces == len(VARIANTS)


def test_formats_never_match_across_each_other(store: Store) -> None:
    """What was saved in one format of attention K and V isn't found in another."""
    tokens = made_up(100, 1)
    formats: tuple[KVFormat, ...] = ("int8", "int4", "f16")
    for kv in formats:
        engine = SyntheticHybrid(kv)
        with SessionTier(store, engine) as tier:
            assert tier.promote(np.append(tokens, 1)) == 0
            engine.feed(tokens)
            tier.cascade(tokens)
            assert tier.promote(np.append(tokens, 1)) == 100
