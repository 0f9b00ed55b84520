"""One session of each model, read in one go, and taken up again in another process at every place where that is hard."""

from __future__ import annotations

from typing import Any

from kvstore import SessionTier, Store, state_hash
from kvstore.adapters.transformers import TransformersEngine
from kvstore.ids import TokenArray

from .models import BLOCK, WINDOW, engine, greedy, tokens

PROMPT, TURN, END, ANSWER = 3, 40, 47, 64
# the first token; around a window that is full; around a block's end; the turn's boundary. The prompt is read in these chunks.
LENGTHS = (1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, BLOCK - 1, BLOCK, BLOCK + 1, TURN)


def hashed(running: TransformersEngine) -> str:
    """Hash everything that an engine holds."""
    return str(state_hash(running.layout(), running.arrays(running.position), running.position))


def _answer(running: TransformersEngine, prompt: TokenArray, start: int) -> dict[str, Any]:
    for stop in (*(length for length in LENGTHS if length > start), END):
        logits = running.feed(prompt[start:stop])
        start = stop
    return {"logits": logits.float().tolist(), "end": hashed(running), "chosen": int(logits.argmax())}


def uninterrupted(store: Store, name: str, dtype: str) -> dict[str, Any]:
    """Read the prompt chunk by chunk, cascading after each into a namespace of its own, then decode. Nothing is restored."""
    running, prompt = engine(name, dtype), tokens(END, PROMPT)
    stood: dict[str, str] = {}
    position = 0
    for length in LENGTHS:
        running.feed(prompt[position:length])
        position = length
        with SessionTier(store, running, salt=b"%d" % length) as tier:
            tier.cascade(prompt[:length])
        stood[str(length)] = hashed(running)
    found = _answer(running, prompt, position)
    answer = greedy(running, found["chosen"], ANSWER)
    return {**found, "tokens": answer, "last": hashed(running), "stood": stood}


def resumed(store: Store, name: str, dtype: str) -> dict[str, Any]:
    """Restore at each of the lengths, and go on from there as the uninterrupted session did."""
    running, prompt = engine(name, dtype), tokens(END, PROMPT)
    found: dict[str, Any] = {}
    for length in LENGTHS:
        with SessionTier(store, running, salt=b"%d" % length) as tier:
            reused = tier.promote(prompt)
        stood = hashed(running)
        went = _answer(running, prompt, reused)
        answer = greedy(running, went["chosen"], ANSWER)
        found[str(length)] = {**went, "reused": reused, "stood": stood, "tokens": answer, "last": hashed(running)}
    return {**found, "layout": running.layout().fingerprint.hex()}
