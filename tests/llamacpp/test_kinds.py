"""Models with windows, recurrent layers and both: what is restored goes on as an engine that was never interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benches.llamacpp import Context, Model
from kvstore import SessionTier, Store
from kvstore.adapters.llamacpp import LlamaCppEngine
from kvstore.adapters.llamacpp.functions import Functions
from kvstore.ids import TokenArray
from kvstore.layout import state_hash
from tests.support import assert_sound, run_child

from .kinds import (
    AFTER,
    KINDS,
    LENGTHS,
    PARTIAL_KINDS,
    ROWS_KINDS,
    WINDOW_KINDS,
    engine_on,
    random_tokens,
    raw_blob,
    running,
    told,
)
from .snapshots import Snapshot
from .tiny import WINDOW

pytestmark = pytest.mark.model
CAP = 64 << 20

Models = Mapping[str, Model]


@contextmanager
def having_read(model: Model, name: str, pieces: Sequence[TokenArray]) -> Iterator[tuple[Context, LlamaCppEngine]]:
    """Make an engine that has read pieces in turn and was never interrupted.

    With a window it takes llama.cpp's own blob between the pieces, in a new context: a window's cells lie elsewhere after a
    restore, whoever restores it, and what is computed from them differs in its last bits.
    """
    with ExitStack() as stack:
        context, engine = stack.enter_context(running(model, name))
        for number, piece in enumerate(pieces):
            if number and name in WINDOW_KINDS:
                blob = np.frombuffer(raw_blob(context), np.uint8)
                context, engine = stack.enter_context(running(model, name))
                assert Functions(context.library.c, context.pointer).set(blob.ctypes.data, blob.size, 0) == blob.size
            context.decode(piece, context.position())
        yield context, engine


@pytest.mark.parametrize("name", KINDS)
def test_the_layout_is_of_the_model_alone(tiny: Models, name: str) -> None:
    """Size of the context, number of sequences, cells of the window and the probe leave the layout as it is."""
    with running(tiny[name], name) as (_, engine):
        layout = engine.layout()
    assert bool(layout.states) == (name in PARTIAL_KINDS)
    assert bool(layout.streams) == (name in ROWS_KINDS)
    for settings in ({"n_ctx": 256}, {"n_seq_max": 4}, {"swa_full": False}):
        with running(tiny[name], name, **settings) as (context, engine):
            assert engine.layout() == layout
            context.decode(random_tokens(1, WINDOW + 7), 0)
            assert engine_on(context, name, probe=None).layout() == layout
    window = [state for state in layout.states if state.name.startswith("window.")]
    assert bool(window) == (name in WINDOW_KINDS)
    assert all(state.shape[state.bounded[0]] == WINDOW for state in window)


@pytest.mark.parametrize("name", KINDS)
def test_another_process_goes_on_bit_by_bit(tiny: Models, tmp_path: Path, name: str) -> None:
    """State, logits and answers of a new process are those of the engine that saved and went on, at every hard position."""
    expected = []
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        with running(tiny[name], name) as (context, engine), SessionTier(store, engine) as tier:
            for length in LENGTHS:
                prompt = random_tokens(length, length + AFTER)
                engine.reset()
                context.decode(prompt[:length], 0)
                tier.cascade(prompt[:length])
                expected.append([length, told(context, engine, prompt[length:])])
            tier.flush()
            assert tier.stats.saved == len(LENGTHS)
            assert not tier.stats.faults + tier.stats.save_misses
        assert_sound(store)
    code = "import sys; from tests.llamacpp.kinds import resume; resume(*sys.argv[1:])"
    assert json.loads(run_child(code, tmp_path / "s", tiny[name].path, name)) == expected


@pytest.mark.parametrize("name", KINDS)
def test_branches_on_one_dirty_engine(tiny: Models, tmp_path: Path, name: str) -> None:
    """Turns that branch off at earlier positions, on an engine dirty from the last one, equal engines that read nothing else."""
    trunk, turn, other, third = (random_tokens(seed, count) for seed, count in ((1, 100), (2, 70), (3, 80), (4, 90)))
    # what is read in turn, as pieces that are cascaded at their ends, and how much of it is to be restored
    turns = [
        ([trunk], 0),
        ([trunk, turn], 100),
        ([trunk, other], 100),
        ([trunk, turn, third], 170),
        ([trunk, other, turn], 180),
    ]
    with Store.open(tmp_path / "s", max_bytes=CAP) as store, running(tiny[name], name) as (context, engine):
        with SessionTier(store, engine, check=True) as tier:
            for pieces, stored in turns:
                prompt = np.concatenate(pieces)
                assert tier.promote(prompt) == context.position() == stored
                context.decode(prompt[stored:], stored)
                tier.cascade(prompt)
                with having_read(tiny[name], name, pieces) as (fresh, uninterrupted):
                    length = prompt.size
                    mine = state_hash(engine.layout(), engine.arrays(length), length)
                    theirs = state_hash(uninterrupted.layout(), uninterrupted.arrays(length), length)
                    assert mine.differing(theirs) == ()
                    assert told(context, engine, third) == told(fresh, uninterrupted, third)
            # a position that was never a checkpoint: no state, so nothing is offered
            tier.flush()
            assert tier.promote([*trunk[:50], 1, 2, 3]) == (0 if name in PARTIAL_KINDS else 50)
            assert context.position() == (0 if name in PARTIAL_KINDS else 50)
            assert not tier.stats.faults + tier.stats.save_misses + tier.stats.differing_blocks
        assert_sound(store)


@pytest.mark.parametrize("name", WINDOW_KINDS)
@pytest.mark.parametrize("settings", [{"swa_full": False}, {"swa_full": False, "flash_attn": False}], ids=str)
def test_a_window_that_has_gone_round(tiny: Models, name: str, settings: dict[str, Any]) -> None:
    """A window whose cells were used again comes out in order and goes back whole; logits then differ in last bits at most."""
    prompt = random_tokens(5, 306)  # a window of 64 in 256 cells: its last positions are in the first cells again
    with running(tiny[name], name, **settings) as (context, engine), running(tiny[name], name, **settings) as (other, restored):
        context.decode(prompt[:286], 0)
        snapshot = Snapshot(engine, prompt[:286])
        restored.apply(snapshot)
        assert raw_blob(context) != raw_blob(other)  # the same cells in another order
        assert len(raw_blob(context)) == len(raw_blob(other))
        hashes = [state_hash(e.layout(), e.arrays(286), 286) for e in (engine, restored)]
        assert hashes[0].differing(hashes[1]) == ()
        expected, logits = (c.decode(prompt[286:], 286) for c in (context, other))
        assert np.abs(expected - logits).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen35"])
@pytest.mark.parametrize("settings", [{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": False}], ids=str)
def test_other_formats_of_rows(tiny: Models, name: str, settings: dict[str, Any]) -> None:
    """Quantised rows and windows, and transposed V, are restored bit by bit beside states."""
    prompt = random_tokens(6, 120)
    with running(tiny[name], name, **settings) as (context, engine), running(tiny[name], name, **settings) as (other, restored):
        context.decode(prompt[:100], 0)
        restored.apply(Snapshot(engine, prompt[:100]))
        assert told(context, engine, prompt[100:]) == told(other, restored, prompt[100:])


@pytest.mark.parametrize("name", PARTIAL_KINDS)
def test_states_come_where_the_sequence_stands(tiny: Models, name: str) -> None:
    """Every state comes with a capture that ends at the engine's position, and none with one that ends before."""
    prompt = random_tokens(7, 90)
    with running(tiny[name], name) as (context, engine):
        context.decode(prompt, 0)
        assert engine.capture(0, 89).states == {}
        states = engine.capture(0, 90).states
        assert set(states) == {state.name for state in engine.layout().states}
        assert states["position"].tolist() == [90]
        for state in engine.layout().states:
            state.check_array(states[state.name])
