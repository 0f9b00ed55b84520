"""memory: what a process takes, above the caller's arrays, while it saves and restores a long session."""

from __future__ import annotations

from benches.harness import Bench, Context, Needs, Outcome, Size, Table, Target
from benches.rss import Watch
from benches.sessions import TOKEN_BYTES, arrays_for, large_layout, random_tokens
from kvstore import Store

__all__ = ["BENCH"]

_LIMIT_MIB = 256
_SIZES: dict[Size, int] = {"full": 100_000, "quick": 20_000, "smallest": 1500}


def _needs(size: Size) -> Needs:
    total = _SIZES[size] * TOKEN_BYTES
    return Needs(disk=2 * total + (256 << 20), memory=2 * total + (1 << 30))


def _run(context: Context) -> Outcome:
    tokens = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(4, tokens)
    context.say(f"making {tokens * TOKEN_BYTES / 1e9:.2f} GB of rows")
    arrays = arrays_for(layout, tokens)
    outcome = context.outcome
    with Store.open(context.scratch / "store", max_bytes=2 * tokens * TOKEN_BYTES + (256 << 20)) as store:
        namespace = store.namespace(layout)
        context.say("saving")
        with Watch() as saving:
            namespace.save(prompt, arrays)
    with Store.open(context.scratch / "store") as store:
        namespace = store.namespace(layout)
        context.say("restoring")
        with Watch() as restoring, namespace.lease(prompt) as lease:
            lease.copy_into(arrays)
    for name, watch in (("saving", saving), ("restoring", restoring)):
        outcome.figures[name] = {
            "above_mib": watch.above_mib,
            "samples": watch.samples,
            "longest_gap_ms": watch.longest_gap * 1e3,
        }
        outcome.lines.append(
            f"{name}: {watch.above_mib:.1f} MiB above the caller's arrays ({watch.samples} samples, at most "
            f"{watch.longest_gap * 1e3:.0f} ms apart)"
        )
        outcome.targets.append(Target(f"{name}: MiB above the caller's arrays", watch.above_mib, _LIMIT_MIB))
    outcome.tables = [
        Table(
            f"{tokens * TOKEN_BYTES / 1e9:.2f} GB",
            ("", "MiB above the arrays", "ratio to the limit", "samples", "longest gap, ms"),
            tuple(
                (name, f["above_mib"], f["above_mib"] / _LIMIT_MIB, f["samples"], f["longest_gap_ms"])
                for name, f in outcome.figures.items()
            ),
        )
    ]
    return outcome


_METHOD = """\
RssAnon of the process (its own memory, without the pages of mapped files), sampled every 2 ms by a thread while a session is
saved, and while it is restored from the page cache; the most that was seen above what there was right before. Freed memory is
given back first, so that it can't hide what is taken."""

BENCH = Bench(
    "memory", "the process's own memory above the caller's arrays while 1.6 GB are saved and restored", _needs, _run, _METHOD
)
