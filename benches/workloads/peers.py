"""peers: kvstore against what people would use instead, on the same sessions, each in processes of its own."""

from __future__ import annotations

import os
import shutil

from benches.harness import Bench, Context, Interrupted, Needs, Outcome, Size
from benches.peers.measure import Compared, Plan, compare
from benches.peers.processes import PeerFailed
from benches.peers.registry import PEERS, Peer, missing
from benches.peers.report import report
from benches.peers.shape import Shape

__all__ = ["BENCH"]

_THREADS = 2
_SIZES: dict[Size, Plan] = {
    "full": Plan(Shape(16, 2048), tokens=6144, base=1024, turn=512, rounds=7, threads=_THREADS, patience=180),
    "quick": Plan(Shape(4, 2048), tokens=3072, base=1024, turn=512, rounds=3, threads=_THREADS, patience=90),
    "smallest": Plan(Shape(2, 256), tokens=1024, base=256, turn=256, rounds=1, threads=_THREADS, patience=60),
}


def _needs(size: Size) -> Needs:
    plan = _SIZES[size]
    longest = plan.longest * plan.shape.token_bytes
    # three sessions on either side and what is rewritten while the old one is still there; arrays and buffers of two processes
    return Needs(disk=10 * longest + (512 << 20), memory=12 * longest + (3 << 30) * (size != "smallest"))


def _absent(peer: Peer, size: Size) -> str:
    if size == "smallest" and not peer.own_python:
        return "not installed: not looked for at this size; run `make bench-peers`, then `python -m benches run peers`"
    return missing(peer)


def _run(context: Context) -> Outcome:
    plan = _SIZES[context.size]
    plan = Plan(**{**{f: getattr(plan, f) for f in plan.__slots__}, "threads": min(_THREADS, os.cpu_count() or 1)})
    outcome = Outcome()
    done: list[Compared] = []
    try:
        for place, peer in enumerate(PEERS):
            compared = Compared(peer)
            done.append(compared)
            reason = _absent(peer, context.size)
            if reason:
                compared.installed, compared.failure = False, reason
                continue
            own = context.scratch / f"peer-{place}"
            own.mkdir()
            try:
                compare(peer, plan, own, context.say, compared)
            except PeerFailed as error:
                compared.failure = str(error)
                context.say(f"{peer.name} failed: {error}")
            finally:
                shutil.rmtree(own, ignore_errors=True)
    except KeyboardInterrupt as stop:
        done[-1].failure = "interrupted"
        report(done, plan, outcome)
        outcome.doubts.append(f"interrupted after {len(done) - 1} of {len(PEERS)} peers")
        raise Interrupted(outcome) from stop
    report(done, plan, outcome)
    return outcome


BENCH = Bench(
    "peers",
    "kvstore against LMCache, SGLang's and Mooncake's stores, NIXL, and what is written in an afternoon",
    _needs,
    _run,
    method=(
        "Each store is driven in processes of its own: one saves, a new one restores. kvstore and one peer alternate within each pair, "
        "so that ratios hold on a noisy machine; each pair is measured with the same bytes and the same number of threads, into the same "
        "kind of arrays. What can't be installed is reported with the reason (`make bench-peers` installs them)."
    ),
)
