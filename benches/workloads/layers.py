"""layers: how long the first stream and the first layer of a long session take, while the others are still being restored."""

from __future__ import annotations

import time

from benches import pagecache
from benches.harness import Bench, Context, Needs, Outcome, Size, Table, Target, median, pairs, quantile
from benches.rss import Watch
from benches.sessions import arrays_for, bytes_of, random_tokens, touched
from kvstore import Layout, Namespace, Store, Stream

__all__ = ["BENCH"]

_THREADS = 2
_LAYERS = 30
_LIMIT = 1 / 15
# tokens, rounds
_SIZES: dict[Size, tuple[int, int]] = {"full": (100_000, 9), "quick": (20_000, 7), "smallest": (1500, 2)}


def _layout() -> Layout:
    """16,320 bytes a token: K and V of 30 layers of attention, one head of 136 in f16 each."""
    streams = [Stream(f"{part}{layer}", "f16", (1, 136)) for layer in range(_LAYERS) for part in "kv"]
    return Layout(streams=tuple(streams), model="bench-30-layers")


def _needs(size: Size) -> Needs:
    total = _SIZES[size][0] * 16320
    return Needs(disk=int(1.3 * total) + (256 << 20), memory=3 * total + (1 << 30))


def _run(context: Context) -> Outcome:
    tokens, rounds = _SIZES[context.size]
    layout = _layout()
    prompt = random_tokens(6, tokens)
    directory = context.scratch / "store"
    outcome = context.outcome
    source = arrays_for(layout, tokens)
    total = bytes_of(source)
    context.say(f"saving {total / 1e9:.2f} GB")
    with Store.open(directory, max_bytes=int(1.2 * total) + (256 << 20)) as store:
        store.namespace(layout).save(prompt, source)
    into = touched(layout, tokens)
    data = directory / "data.mdb"
    first: dict[str, list[float]] = {"warm": [], "cold": []}
    layer: dict[str, list[float]] = {"warm": [], "cold": []}

    def layer_first(namespace: Namespace, kind: str) -> float:
        """Seconds of the whole, lease included; notes those until the first stream, and both streams of layer 0, were there."""
        start = time.perf_counter()
        with namespace.lease(prompt) as lease, lease.start_copy(into, threads=_THREADS) as copy:
            copy.wait("k0")
            first[kind].append(time.perf_counter() - start)
            copy.wait("v0")
            layer[kind].append(time.perf_counter() - start)
            copy.finish()
            return time.perf_counter() - start

    def at_once(namespace: Namespace) -> float:
        start = time.perf_counter()
        with namespace.lease(prompt) as lease:
            lease.copy_into(into, threads=_THREADS)
        return time.perf_counter() - start

    with Store.open(directory) as store:
        namespace = store.namespace(layout)  # as a server has it, once for all its sessions
        at_once(namespace)
        if any((into[name].view("u2") != source[name].view("u2")).any() for name in ("k0", "v29")):
            raise AssertionError("what was restored is not what was saved")
        del source
        at_once(namespace)  # what the page cache did not have is there from the second time on
        warm = pairs(
            context, "warm", rounds, {"layer_first": lambda: layer_first(namespace, "warm"), "at_once": lambda: at_once(namespace)}
        )
        with Watch() as watch:
            layer_first(namespace, "warm")
        first["warm"].pop()
        layer["warm"].pop()

    def cold() -> float:
        pagecache.drop(data)
        with Store.open(directory) as store:
            return layer_first(store.namespace(layout), "cold")

    whole = pairs(context, "cold", min(rounds, 5), {"layer_first": cold})["layer_first"]
    cost = median([a / b for a, b in zip(warm["layer_first"], warm["at_once"], strict=True)])
    shares = {
        kind: {
            what: median([part / all_of_it for part, all_of_it in zip(parts[kind], taken, strict=True)])
            for what, parts in (("stream", first), ("layer", layer))
        }
        for kind, taken in (("warm", warm["layer_first"]), ("cold", whole))
    }
    outcome.figures = {
        "bytes": total,
        "layers": _LAYERS,
        "threads": _THREADS,
        "shares": shares,
        "warm_cost": cost,
        "peak_mib": watch.above_mib,
        "seconds": {"first_stream": first, "first_layer": layer, "warm": warm, "cold": whole},
    }
    for kind, taken in (("warm", warm["layer_first"]), ("cold", whole)):
        outcome.lines.append(
            f"{kind}: first stream after {median(first[kind]) * 1e3:.1f} ms, lease included, 1/{1 / shares[kind]['stream']:.1f} "
            f"of the whole; layer 0 after {median(layer[kind]) * 1e3:.1f} ms, 1/{1 / shares[kind]['layer']:.1f}; all {_LAYERS} "
            f"layers after {median(taken) * 1e3:.1f} ms"
        )
    outcome.lines.append(
        f"warm: {cost:.3f} times the copy without waiting; memory: at most {watch.above_mib:.1f} MiB above the arrays"
    )
    outcome.tables = [
        Table(
            f"{total / 1e9:.2f} GB, {_LAYERS} layers of two streams, lease included",
            (
                "",
                "first stream p50, ms",
                "p90",
                "ratio of the whole to it",
                "layer 0 p50, ms",
                "p90, layer",
                "ratio of the whole to layer 0",
                "all p50, ms",
                "p90, all",
            ),
            tuple(
                (
                    kind,
                    *(quantile(first[kind], q) * 1e3 for q in (0.5, 0.9)),
                    1 / shares[kind]["stream"],
                    *(quantile(layer[kind], q) * 1e3 for q in (0.5, 0.9)),
                    1 / shares[kind]["layer"],
                    *(quantile(taken, q) * 1e3 for q in (0.5, 0.9)),
                )
                for kind, taken in (("warm", warm["layer_first"]), ("cold", whole))
            ),
            f"Waiting for layers costs {cost:.3f} times the copy at once, warm; memory at most {watch.above_mib:.1f} MiB above the "
            "arrays.",
        )
    ]
    outcome.targets = [Target("warm: the first stream, as a share of the whole", shares["warm"]["stream"], _LIMIT)]
    return outcome


_METHOD = """\
A session of 100,000 tokens in 30 layers of two streams. `start_copy` restores it on a thread of its own with two threads of the
pool, and the caller waits for the first stream, then for both of layer 0, then for all; times count from the lease on. In turns
with a copy that nobody waits for in between. Cold: the file dropped from the page cache and the store opened anew before each
round."""

BENCH = Bench("layers", "the first of 30 layers during a restore of 1.6 GB, against the whole", _needs, _run, _METHOD)
