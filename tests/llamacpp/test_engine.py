"""The adapter on the real model: what comes out, what goes back in, and what is refused."""

from typing import Any

import numpy as np
import pytest

from benches.llamacpp import Context
from benches.llamacpp.model import Model
from kvstore.adapters.llamacpp import BlobError, LlamaCppEngine, LlamaCppError
from kvstore.adapters.llamacpp.frame import Frame
from kvstore.adapters.llamacpp.functions import Functions
from kvstore.errors import BlockDamaged, EngineError, LayoutError
from kvstore.layout import state_hash

from .conftest import Make
from .snapshots import Snapshot, rows

pytestmark = pytest.mark.model

CONFIGURATIONS: list[dict[str, Any]] = [
    {"flash_attn": True},
    {"flash_attn": False},
    {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    {"flash_attn": False, "type_k": "q8_0"},
]


@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=str)
def test_a_round_trip_is_bit_equal(make: Make, tokens: list[int], settings: dict[str, Any]) -> None:
    """State and logits after a restore into a new context equal those of the engine that computed them, bit for bit."""
    context, engine = make(**settings)
    context.decode(tokens[:270], 0)
    snapshot = Snapshot(engine, tokens[:270])
    expected = context.decode(tokens[270:300], 270)
    state = state_hash(engine.layout(), engine.arrays(300), 300)

    other, restored = make(**settings)
    assert restored.layout() == engine.layout()
    restored.apply(snapshot)
    assert other.position() == 270
    logits = other.decode(tokens[270:300], 270)
    assert np.array_equal(logits, expected)
    assert state_hash(restored.layout(), restored.arrays(300), 300) == state
    assert other.greedy(logits, 5) == context.greedy(expected, 5)


@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=str)
def test_a_range_is_the_slice_of_the_whole(make: Make, tokens: list[int], settings: dict[str, Any]) -> None:
    """Capturing [start, stop) gives exactly those rows of a capture of everything, and leaves the sequence as it was."""
    context, engine = make(**settings)
    context.decode(tokens[:300], 0)
    whole = {name: rows.copy() for name, rows in engine.arrays(300).items()}
    for start, stop in ((0, 1), (0, 128), (128, 256), (256, 300), (299, 300)):
        part = rows(engine, start, stop)
        for stream in engine.layout().streams:
            span = (slice(None),) * stream.token_axis + (slice(start, stop),)
            assert np.array_equal(part[stream.name], whole[stream.name][span]), (stream.name, start, stop)
    assert context.position() == 300
    assert context.position(1) == 0


def test_the_layout_names_what_changes_the_bytes(make: Make) -> None:
    """Types, transposition, rotation and the caller's build and weights make different layouts of one model."""
    layouts = [make(**settings)[1].layout() for settings in CONFIGURATIONS]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    streams = layouts[0].streams
    assert [s.name for s in streams[:4]] == ["k.0", "v.0", "k.1", "v.1"]
    assert (len(streams), streams[0].row_shape, streams[0].dtype) == (60, (192,), "f16")
    assert {"build", "weights", "llamacpp.seq_version", "llamacpp.rotation_k"} <= set(dict(layouts[0].identity))


def test_the_layout_is_the_same_with_and_without_a_probe(make: Make, tokens: list[int]) -> None:
    """A layout learned from a sequence that holds tokens is the one that a probe shows; the probe leaves nothing behind."""
    context, probed = make()
    assert (context.position(), context.position(1)) == (0, 0)
    context.decode(tokens[:10], 0)
    later = LlamaCppEngine(context.library.c, context.pointer, model="smollm2", identity=context.settings)
    assert later.layout() == probed.layout()


def test_cells_out_of_order_come_out_in_order(make: Make, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come out by position even when the session's later cells have filled holes that another sequence left."""
    orders: list[Any] = []
    check = Frame.check

    def spy(*arguments: Any, **named: Any) -> Any:
        found = check(*arguments, **named)
        orders.append(found["rows"])
        return found

    monkeypatch.setattr(Frame, "check", spy)
    for settings in CONFIGURATIONS[:2]:
        context, engine = make(n_seq_max=3, **settings)
        for start in range(0, 60, 20):  # sequences 0 and 2 take turns
            context.decode(tokens[start : start + 20], start, seq=2)
            context.decode(tokens[start : start + 20], start)
        context.truncate(0, seq=2)
        context.decode(tokens[60:120], 60)
        orders.clear()
        every = {name: array.copy() for name, array in engine.arrays(120).items()}
        assert orders[0] is not None
        for position in (0, 25, 59, 60, 61, 119):
            one = rows(engine, position, position + 1)
            for stream in engine.layout().streams:
                assert np.array_equal(every[stream.name].take([position], axis=stream.token_axis), one[stream.name])


def test_a_failed_copy_raises_and_a_reset_clears(make: Make, tokens: list[int]) -> None:
    """When the stored bytes do not pass, the error passes through; both sequences are empty after a reset, and usable."""
    context, engine = make()
    context.decode(tokens[:64], 0)
    snapshot = Snapshot(engine, tokens[:64])
    whole = state_hash(engine.layout(), engine.arrays(64), 64)
    snapshot.damaged = True
    with pytest.raises(BlockDamaged):
        engine.apply(snapshot)
    assert context.position(1) == 0
    engine.reset()
    assert context.position() == 0
    snapshot.damaged = False
    engine.apply(snapshot)
    assert state_hash(engine.layout(), engine.arrays(64), 64) == whole


def test_too_small_a_context_is_an_error(make: Make, tokens: list[int]) -> None:
    """A prefix that does not fit the context is refused by name, and after a reset the engine is usable."""
    context, engine = make()
    context.decode(tokens[:400], 0)
    snapshot = Snapshot(engine, tokens[:400])
    small, other = make(n_ctx=256)
    with pytest.raises(LlamaCppError, match="context large enough"):
        other.apply(snapshot)
    other.reset()
    small.decode(tokens[:32], 0)
    assert small.position() == 32


def test_positions_that_are_not_there_are_refused(make: Make, tokens: list[int]) -> None:
    """Capturing what the sequence does not hold names what it holds."""
    context, engine = make()
    with pytest.raises(EngineError, match="holds positions -1 to -1"):
        engine.capture(0, 1)
    context.decode(tokens[:32], 0)
    for start, stop in ((0, 33), (5, 5), (-1, 4), (32, 40)):
        with pytest.raises(EngineError, match="holds positions 0 to 31"):
            engine.capture(start, stop)


def test_a_hole_in_the_sequence_is_refused(make: Make, tokens: list[int]) -> None:
    """Rows missing from the middle of a sequence are noticed, though its first and last position look right."""
    context, engine = make()
    context.decode(tokens[:64], 0)
    Functions(context.library.c, context.pointer).remove(0, 20, 24)
    with pytest.raises(BlobError, match="lacks some of the positions"):
        engine.capture(0, 64)
    assert context.position(1) == 0


def test_a_scratch_sequence_in_use_is_refused(make: Make, tokens: list[int]) -> None:
    """The engine never clears a scratch sequence that somebody else has filled."""
    context, engine = make()
    context.decode(tokens[:8], 0)
    context.decode(tokens[:4], 0, seq=1)
    with pytest.raises(EngineError, match="nobody else uses"):
        engine.capture(0, 8)
    assert context.position(1) == 4


def test_an_empty_context_without_a_probe_is_refused(make: Make) -> None:
    """Without a token and without a probe there is no layout, and the error says what to pass."""
    with pytest.raises(LayoutError, match="pass probe="):
        make(probe=False)


@pytest.mark.parametrize("settings", [{"unified": False}, {"n_seq_max": 1}], ids=str)
@pytest.mark.parametrize("probe", [True, False])
def test_contexts_that_cannot_share_cells_are_refused(
    make: Make, model: Model, tokens: list[int], settings: dict[str, Any], probe: bool
) -> None:
    """A context that is not unified, or has one sequence, is refused at construction with the settings it needs."""
    with Context(model, 512, **settings) as context:
        if not probe:
            context.decode(tokens[:8], 0)
        with pytest.raises(LayoutError, match="kv_unified = true and n_seq_max >= 2"):
            LlamaCppEngine(
                context.library.c,
                context.pointer,
                model="smollm2",
                identity=context.settings,
                probe=context.probe if probe else None,
            )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"build": ""}, "lacks build"),
        ({"weights": None}, "lacks weights"),
        ({"llamacpp.v_trans": 0}, "reads from the engine itself"),
    ],
)
def test_an_identity_that_could_mislead_is_refused(make: Make, change: dict[str, Any], says: str) -> None:
    """The identity must name build and weights, and may not claim what the adapter reads from the blob."""
    context, _ = make()
    identity = {**context.settings, **change}
    with pytest.raises(LayoutError, match=says):
        LlamaCppEngine(context.library.c, context.pointer, model="m", identity=identity, probe=context.probe)


def test_the_library_object_is_left_as_it_was(make: Make) -> None:
    """The adapter's prototypes are its own: those on the caller's library object do not change."""
    context, _ = make()
    library: Any = context.library.c
    assert library.llama_state_seq_get_size_ext.argtypes is None
    assert len(library.llama_memory_seq_rm.argtypes) == 4


@pytest.mark.parametrize("pointer", [0, None, "x", True])
def test_what_is_no_context_is_refused(make: Make, pointer: Any) -> None:
    """A null pointer or something that is no address is an error, not a crash."""
    context, _ = make()
    with pytest.raises(LlamaCppError, match="address of a llama_context"):
        LlamaCppEngine(context.library.c, pointer, model="m", identity=context.settings)


def test_a_library_without_the_functions_is_refused(make: Make) -> None:
    """A library that lacks a function is refused by the function's name."""
    context, _ = make()
    with pytest.raises(LlamaCppError, match="llama_get_model"):
        LlamaCppEngine(object(), context.pointer, model="m", identity=context.settings)


def test_the_buffer_is_kept_and_given_back(make: Make, tokens: list[int]) -> None:
    """Calls reuse one buffer, as large as the longest range so far, until it is released."""
    context, engine = make()
    context.decode(tokens[:256], 0)
    first = rows(engine, 0, 128)["k.0"]
    second = rows(engine, 128, 256)["k.0"]
    assert np.shares_memory(first, second)
    engine.release()
    assert not np.shares_memory(rows(engine, 0, 128)["k.0"], second)
