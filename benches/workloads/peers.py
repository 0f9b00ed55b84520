"""peers: kvstore against what people would use instead, on the same sessions, each in processes of its own."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace

from benches.harness import Bench, Context, Needs, Outcome, Size
from benches.peers.measure import Compared, Plan, compare
from benches.peers.processes import PeerFailed
from benches.peers.registry import LLAMA_PEERS, PEERS, Peer, missing
from benches.peers.report import report
from benches.peers.shape import Shape

__all__ = ["BENCH"]

_THREADS = 2
_SIZES: dict[Size, Plan] = {
    "full": Plan(Shape(16, 2048), tokens=6144, base=1024, turn=512, rounds=7, threads=_THREADS, patience=180),
    "quick": Plan(Shape(16, 1024), tokens=1536, base=512, turn=256, rounds=3, threads=_THREADS, patience=90),
    "smallest": Plan(Shape(2, 256), tokens=1024, base=256, turn=256, rounds=1, threads=_THREADS, patience=60),
}
# K and V of SmolLM2-135M: 30 layers of 3 heads of 64 in f16
_LLAMA = Shape(30, 384)
_LLAMA_SIZES: dict[Size, Plan] = {
    "full": Plan(_LLAMA, tokens=4096, base=512, turn=256, rounds=7, threads=_THREADS, patience=180),
    "quick": Plan(_LLAMA, tokens=1024, base=256, turn=128, rounds=3, threads=_THREADS, patience=90),
    "smallest": Plan(_LLAMA, tokens=512, base=128, turn=64, rounds=1, threads=_THREADS, patience=60),
}


def _needs(size: Size) -> Needs:
    plan = _SIZES[size]
    longest = plan.longest * plan.shape.token_bytes
    # three sessions on either side and what is rewritten while the old one is still there; arrays and buffers of two processes
    return Needs(disk=10 * longest + (512 << 20), memory=12 * longest + (3 << 30) * (size != "smallest"))


def _absent(peer: Peer, size: Size) -> str:
    if size == "smallest" and (not peer.own_python or peer.group != "arrays"):
        return "not looked for at this size"
    return missing(peer)


def _one(context: Context, peer: Peer, plan: Plan, compared: Compared) -> None:
    reason = _absent(peer, context.size)
    if reason:
        compared.installed, compared.failure = False, reason
        return
    own = context.scratch / "peer"
    own.mkdir()
    try:
        compare(peer, plan, own, context.say, compared)
    except PeerFailed as error:
        compared.failure = str(error)
        context.say(f"{peer.name} failed: {error}")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _run(context: Context) -> Outcome:
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    groups: list[tuple[str, Plan, list[Compared]]] = [
        ("", replace(_SIZES[context.size], threads=threads), []),
        ("llama.cpp", replace(_LLAMA_SIZES[context.size], threads=threads), []),
    ]
    outcome = context.outcome
    every = [(peer, *groups[0][1:]) for peer in PEERS] + [(peer, *groups[1][1:]) for peer in LLAMA_PEERS]
    began = time.perf_counter()
    for place, (peer, plan, done) in enumerate(every):
        done.append(Compared(peer))
        try:
            _one(context, peer, plan, done[-1])
        except KeyboardInterrupt:
            done[-1].failure = "interrupted"
            report(groups, outcome)
            outcome.doubts.append(f"interrupted after {place} of {len(every)} peers")
            raise
        left = (time.perf_counter() - began) / (place + 1) * (len(every) - place - 1)
        context.say(f"{place + 1} of {len(every)} peers" + (f", about {left:.0f} s left" if left >= 1 else ""))
    report(groups, outcome)
    return outcome


BENCH = Bench(
    "peers",
    "kvstore against LMCache, SGLang's and Mooncake's stores, NIXL, and what is written in an afternoon",
    _needs,
    _run,
    method=(
        "Each store is driven in processes of its own: one saves, a new one restores. kvstore and one peer alternate within a "
        "pair, so that ratios hold on a noisy machine; both have the same bytes and the same number of threads, and end in the "
        "same kind of arrays. What can't be installed is reported with the reason (`make bench-peers` installs them). Stores of "
        "llama.cpp save from and restore into a context of the real model, whose rows are made up and put into it before."
    ),
    behind=(
        "Each row in which kvstore takes more than a peer stands in the table “Where kvstore is not ahead”, with what is known "
        "of the reason; without such a table there is none."
    ),
    apart=True,
)
