"""The small server: one process, one engine, requests as JSON lines on stdin, events as JSON lines on stdout.

Run by the demo as `python -m benches.demo.server`. It ends when its stdin does, so it never outlives the demo.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from benches.llamacpp import Context, Model, smollm2_path
from benches.serving import Operations, Send, serve
from kvstore import SessionTier, Store, state_hash
from kvstore.adapters.llamacpp import LlamaCppEngine

__all__ = ["MODEL", "Server", "main"]

MODEL = "SmolLM2-135M-Instruct"


class _Lines(logging.Handler):
    """Keeps what the library logs, for the answer to the request."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Server:
    """What one process answers. `tier` is None in a process without a store (the reference, the cold runs)."""

    def __init__(self, context: Context, tier: SessionTier | None, engine: LlamaCppEngine, send: Send) -> None:
        self.context, self.tier, self.engine, self.send = context, tier, engine, send
        self.lines = _Lines()
        logging.getLogger("kvstore").addHandler(self.lines)

    def tokenize(self, text: str) -> dict[str, Any]:
        """Turn text into tokens; the demo does this once for each text."""
        return {"ids": self.context.model.tokenize(text)}

    def cold(self, tokens: list[int]) -> dict[str, Any]:
        """Read everything from position 0, without promote: the time to first token that a server without a store has."""
        begin = time.perf_counter()
        self.engine.reset()
        logits = self._read(tokens, 0)
        return {"ttft": time.perf_counter() - begin, "first": int(np.argmax(logits))}

    def serve(self, tokens: list[int], answer: int, promote: bool) -> dict[str, Any]:
        """Do what a server does with a request: promote, read the rest, cascade at the turn's boundary, answer, cascade."""
        assert self.tier is not None
        begin = time.perf_counter()
        if promote:
            reused = self.tier.promote(tokens)
        else:
            self.engine.reset()
            reused = 0
        promoted = time.perf_counter() - begin
        logits = self._read(tokens, reused)
        first = int(np.argmax(logits))
        ttft = time.perf_counter() - begin
        result: dict[str, Any] = {"reused": reused, "ttft": ttft, "restore": promoted if promote else 0.0, "first": first}
        result |= self._evidence(tokens, logits)
        saving = time.perf_counter()
        self.tier.cascade(tokens)
        saving = time.perf_counter() - saving
        ids = self.context.greedy(logits, answer)
        writing = time.perf_counter()
        self.tier.cascade([*tokens, *ids[:-1]])  # the last one was sampled and not evaluated
        self.tier.flush()
        result |= {"answer": ids, "text": self.context.model.detokenize(ids)}
        result |= {"save": saving + time.perf_counter() - writing, "stats": _numbers(self.tier.stats), "log": self.lines.take()}
        return result

    def resume(self, tokens: list[int], position: int, answer: int) -> dict[str, Any]:
        """Do what a live engine does: it stands somewhere, is cut to `position` and reads on; nothing is stored or restored."""
        if self.context.position() < position:
            raise RuntimeError(f"the reference stands at {self.context.position()}, cannot be cut to {position}")
        self.context.truncate(position)
        logits = self._read(tokens, position)
        result = {"first": int(np.argmax(logits))} | self._evidence(tokens, logits)
        ids = self.context.greedy(logits, answer)
        return result | {"answer": ids, "text": self.context.model.detokenize(ids)}

    def _read(self, tokens: list[int], position: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.send(event="progress", done=0, total=len(tokens) - position)

        def tick(done: int, total: int) -> None:
            self.send(event="progress", done=done, total=total)

        return self.context.decode(tokens[position:], position, on_progress=tick)

    def _evidence(self, tokens: list[int], logits: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
        """Hash the whole state and the first token's logits, bit for bit."""
        length = len(tokens)
        state = state_hash(self.engine.layout(), self.engine.arrays(length), length)
        return {"state": {"length": length, "parts": state.parts}, "logits": blake3(logits.tobytes()).hexdigest(length=16)}


def _numbers(stats: object) -> dict[str, float]:
    names = [name for name in dir(stats) if not name.startswith("_")]
    return {name: value for name in names if isinstance(value := getattr(stats, name), (int, float))}


@contextmanager
def _serving(send: Send, options: argparse.Namespace) -> Iterator[Operations]:
    with ExitStack() as stack:
        model = stack.enter_context(Model(smollm2_path()))
        context = stack.enter_context(Context(model, options.context))
        engine = LlamaCppEngine(model.library.c, context.pointer, model=MODEL, identity=context.settings, probe=context.probe)
        tier = None
        if options.store is not None:
            store = stack.enter_context(Store.open(options.store, max_bytes=options.max_bytes))
            tier = stack.enter_context(SessionTier(store, engine, salt=b"", check=True))
        server = Server(context, tier, engine, send)
        send(event="ready", layout=engine.layout().canonical.decode("ascii"))
        yield {"tokenize": server.tokenize, "cold": server.cold, "serve": server.serve, "resume": server.resume}


def main(argv: list[str] | None = None) -> int:
    """Serve until stdin ends. An error is sent as an event before the process ends with 1."""
    parser = argparse.ArgumentParser(prog="python -m benches.demo.server", description=__doc__)
    parser.add_argument("--context", type=int, required=True, help="cells of the KV cache")
    parser.add_argument("--store", type=Path, help="the store's directory; without it nothing is stored or restored")
    parser.add_argument("--max-bytes", type=int, help="the store's cap, to create it")
    options = parser.parse_args(argv)
    return serve(lambda send: _serving(send, options))


if __name__ == "__main__":
    sys.exit(main())
