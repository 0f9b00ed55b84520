"""sharing: what three sessions of the real model take on disk that have most of their tokens in common."""

from __future__ import annotations

from benches.demo.server import MODEL
from benches.demo.text import STORIES
from benches.harness import Bench, Needs, Outcome, Size, Table, Target, Unavailable
from benches.harness import Context as BenchContext
from benches.llamacpp import Context, DriverError, Model, smollm2_path
from kvstore import SessionTier, Store
from kvstore.adapters.llamacpp import LlamaCppEngine

__all__ = ["BENCH"]

# tokens in common, tokens of its own
_SIZES: dict[Size, tuple[int, int]] = {"full": (3000, 500), "quick": (1000, 170), "smallest": (260, 50)}
_SESSIONS = 3
_LIMIT = 1.1


def _needs(size: Size) -> Needs:
    shared, own = _SIZES[size]
    rows = (shared + _SESSIONS * own) * 24_000
    return Needs(disk=2 * rows + (256 << 20), memory=2 * rows + (2 << 30))


def _prompts(model: Model, shared: int, own: int) -> list[list[int]]:
    """Sessions that begin alike and go on with a story of each one's own."""
    texts = [" ".join(story.sentences(400)) for story in (*STORIES, STORIES[0])]
    common = model.tokenize(" ".join(texts))[:shared]
    prompts = [common + model.tokenize(f"{n}. {text}")[-own:] for n, text in enumerate(texts[:_SESSIONS])]
    if any(len(prompt) != shared + own for prompt in prompts):
        raise RuntimeError("the stories are too short for this size")
    return prompts


def _run(bench: BenchContext) -> Outcome:
    shared, own = _SIZES[bench.size]
    outcome = bench.outcome
    try:
        path = smollm2_path()
    except DriverError as error:
        raise Unavailable(str(error)) from error
    with (
        Model(path) as model,
        Context(model, shared + own + 64) as context,
        Store.open(bench.scratch / "store", max_bytes=_needs(bench.size).disk) as store,
    ):
        engine = LlamaCppEngine(model.library.c, context.pointer, model=MODEL, identity=context.settings, probe=context.probe)
        prompts = _prompts(model, shared, own)
        with SessionTier(store, engine) as tier:
            for number, prompt in enumerate(prompts):
                bench.say(f"session {number + 1} of {_SESSIONS}: {len(prompt)} tokens")
                reused = tier.promote(prompt)
                context.decode(prompt[reused:], reused)
                tier.cascade(prompt)
            tier.flush()
            if tier.stats.saved != _SESSIONS:
                raise RuntimeError(f"not all sessions were saved: {tier.stats}")
            whole = sum(_restorable(tier, prompt) for prompt in prompts)
        stats = store.stats()
        token_bytes = engine.layout().token_bytes
    distinct = len({tuple(prompt[: n + 1]) for prompt in prompts for n in range(len(prompt))}) * token_bytes
    outcome.figures = {
        "sessions": _SESSIONS,
        "shared_tokens": shared,
        "own_tokens": own,
        "restorable_tokens": whole,
        "distinct_bytes": distinct,
        "separate_bytes": _SESSIONS * (shared + own) * token_bytes,
        "disk_bytes": stats.file_bytes,
        "live_bytes": stats.live_bytes,
        "payload_bytes": stats.payload_bytes,
    }
    outcome.lines.append(
        f"{_SESSIONS} sessions of {shared} shared and {own} own tokens: {stats.file_bytes / 1e6:.1f} MB on disk for "
        f"{distinct / 1e6:.1f} MB of distinct rows; apart they would take {_SESSIONS * (shared + own) * token_bytes / 1e6:.1f} MB"
    )
    separate = _SESSIONS * (shared + own) * token_bytes
    outcome.tables = [
        Table(
            f"{_SESSIONS} sessions, {shared:,} tokens in common and {own:,} of each one's own",
            ("", "MB", "ratio to the distinct rows"),
            tuple(
                (what, size / 1e6, size / distinct)
                for what, size in (
                    ("rows of distinct tokens", distinct),
                    ("payload stored", stats.payload_bytes),
                    ("live pages, with index and padding", stats.live_bytes),
                    ("on disk", stats.file_bytes),
                    ("apart, each whole", separate),
                )
            ),
        )
    ]
    if bench.size == "full":
        outcome.targets.append(Target("bytes on disk over those of the distinct tokens", stats.file_bytes / distinct, _LIMIT))
    outcome.targets.append(Target("tokens that can't be restored", float(sum(map(len, prompts)) - whole), 0.0))
    return outcome


def _restorable(tier: SessionTier, prompt: list[int]) -> int:
    found = tier.namespace.match(prompt)
    return 0 if found is None else found.length


_METHOD = """\
The real model (SmolLM2-135M by llama.cpp) reads three prompts that begin alike, each saved by the tier as a server would. What
they take on disk, against the rows of their distinct tokens: a token counts once for each prefix that ends with it. That each can
be restored whole is checked."""

BENCH = Bench("sharing", "disk space of three sessions of the real model that share most of their tokens", _needs, _run, _METHOD)
