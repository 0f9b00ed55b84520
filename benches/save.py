"""save: a long new session, durably, against plain writes of the same bytes."""

from __future__ import annotations

import os
import shutil
import time

import blake3

from benches.harness import Bench, Context, Needs, Outcome, Size, median, pairs
from benches.sessions import TOKEN_BYTES, arrays_for, bytes_of, large_layout, pieces, random_tokens
from kvstore import Store

__all__ = ["BENCH"]

_PIECE = 8 << 20
# (tokens, pairs)
_SIZES: dict[Size, tuple[int, int]] = {"full": (100_000, 7), "quick": (20_000, 7), "smallest": (1500, 2)}


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * TOKEN_BYTES
    return Needs(disk=3 * total + (256 << 20), memory=2 * total + (1 << 30))


def _run(context: Context) -> Outcome:
    tokens, count = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(3, tokens)
    context.say(f"making {tokens * TOKEN_BYTES / 1e9:.2f} GB of rows")
    source = arrays_for(layout, tokens)
    total = bytes_of(source)
    cap = 2 * total + (256 << 20)
    plain_file, store_dir = context.scratch / "plain", context.scratch / "store"

    def plain(each: bool) -> float:
        start = time.perf_counter()
        with plain_file.open("wb", buffering=0) as file:
            for piece in pieces(source, _PIECE):
                for part in piece:
                    file.write(part)
                if each:
                    os.fdatasync(file.fileno())
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - start
        plain_file.unlink()
        return seconds

    processor: list[float] = []

    def stored() -> float:
        with Store.open(store_dir, max_bytes=cap) as store:
            namespace = store.namespace(layout)
            before = time.process_time()
            start = time.perf_counter()
            saved = namespace.save(prompt, source)
            seconds = time.perf_counter() - start
            processor.append(time.process_time() - before)
            if saved.new_tokens != tokens:
                raise AssertionError(f"saved {saved}")
        shutil.rmtree(store_dir)
        return seconds

    def hashed() -> float:
        start = time.perf_counter()
        for piece in pieces(source, 4 << 20):
            hasher = blake3.blake3()
            for part in piece:
                hasher.update(part)
            hasher.digest()
        return time.perf_counter() - start

    sides = {"plain": lambda: plain(True), "kvstore": stored, "plain_one_sync": lambda: plain(False), "hash_alone": hashed}
    seconds = pairs(context, "saving", count, sides)
    outcome = Outcome()
    speeds = {side: total / median(s) / 1e9 for side, s in seconds.items()}
    ratio = median([p / k for p, k in zip(seconds["plain"], seconds["kvstore"], strict=True)])
    outcome.figures = {
        "bytes": total,
        "pairs": count,
        "gb_s": speeds,
        "ratio": ratio,
        "kvstore_processor_seconds": median(processor),
        "seconds": seconds,
    }
    outcome.lines = [
        f"plain, fdatasync every {_PIECE >> 20} MiB {speeds['plain']:.2f} GB/s, once {speeds['plain_one_sync']:.2f} GB/s; "
        f"kvstore {speeds['kvstore']:.2f} GB/s, ratio {ratio:.3f} to the first",
        f"kvstore takes {median(seconds['kvstore']):.2f} s, {median(processor):.2f} s of processor time; "
        f"hashing alone, one thread, {median(seconds['hash_alone']):.2f} s",
    ]
    return outcome


BENCH = Bench("save", "a new session of 1.6 GB, durable, against plain writes and fdatasync of the same bytes", _needs, _run)
