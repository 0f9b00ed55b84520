"""What llama.cpp takes in silence, or refuses when it is too late: each is noticed before, or ends in a clean sequence."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benches.llamacpp import Context, DriverError, Model
from kvstore import SessionTier, Store
from kvstore.adapters.llamacpp import BlobError, LlamaCppEngine, LlamaCppError
from kvstore.adapters.llamacpp.functions import Functions
from kvstore.adapters.llamacpp.learn import learn
from kvstore.errors import ArrayError, EngineError, LayoutError
from kvstore.layout import StateHash, state_hash
from tests.support import data_file, flip

from .blobs import blob
from .kinds import BLOCK, KINDS, PARTIAL_KINDS, ROWS_KINDS, WINDOW_KINDS, engine_on, random_tokens, running, told
from .snapshots import Snapshot
from .tiny import WINDOW

pytestmark = pytest.mark.model
CAP = 32 << 20
PROMPT = random_tokens(11, 320)

Models = Mapping[str, Model]


def held(engine: LlamaCppEngine, length: int) -> StateHash:
    """Hash everything that an engine holds."""
    return state_hash(engine.layout(), engine.arrays(length), length)


@pytest.mark.parametrize("name", ROWS_KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_the_size_of_a_piece_changes_nothing(tiny: Models, name: str, blocks: int) -> None:
    """A prefix restored in pieces of one block, of several, or in one, is the same and goes on the same."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:300], 0)
        snapshot = Snapshot(engine, PROMPT[:300])
        whole = held(engine, 300)
        other = engine_on(context, name, chunk_bytes=blocks * engine.layout().payload_bytes(BLOCK))
        other.apply(snapshot)
        assert held(engine, 300) == whole
        assert context.position(1) == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_size_that_is_usual(tiny: Models, name: str) -> None:
    """With the size of chunks that is usual, models of every kind are restored as with any other, also those without such rows."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:300], 0)
        snapshot = Snapshot(engine, PROMPT[:300])
        whole = held(engine, 300)
        other = LlamaCppEngine(
            context.library.c,
            context.pointer,
            model=name,
            identity=context.settings,
            probe=context.probe,
            block_tokens=BLOCK,
        )
        other.apply(snapshot)
        assert held(engine, 300) == whole


def test_a_damaged_end_leaves_the_buffers_right(tiny: Models, tmp_path: Path) -> None:
    """Where the last chunk turns out damaged, and what comes before it is restored at once, llama.cpp gets whole blobs, and so it
    does ever after.
    """
    name = "qwen3"
    with (
        Store.open(tmp_path / "s", max_bytes=CAP) as store,
        running(tiny[name], name) as (context, engine),
        SessionTier(store, engine) as tier,
    ):
        context.decode(PROMPT[:300], 0)
        tier.cascade(PROMPT[:300])
        tier.flush()
        shorter = held(engine, 2 * BLOCK)
        assert tier.promote(PROMPT) == 300
        with tier.namespace.lease(PROMPT) as lease:
            at = int(lease._located.offset[2])
        flip(data_file(tmp_path / "s"), at)
        for _ in range(2):
            assert tier.promote(PROMPT) == 2 * BLOCK
            assert held(engine, 2 * BLOCK) == shorter
            assert tier.stats.faults == 0


def test_last_chunks_of_many_lengths(tiny: Models, tmp_path: Path) -> None:
    """Last chunks of more lengths than are remembered go through one memory, in any order and again: each prefix is what it was."""
    name = "qwen3"
    with (
        Store.open(tmp_path / "s", max_bytes=CAP) as store,
        running(tiny[name], name) as (context, engine),
        SessionTier(store, engine) as tier,
    ):
        context.decode(PROMPT[:300], 0)
        tier.cascade(PROMPT[:300])
        tier.flush()
        expected = {length: held(engine, length) for length in range(2 * BLOCK + 1, 300)}
        assert len(expected) > 40
        for length in (*expected, *reversed(expected), *list(expected)[::5]):
            assert tier.promote(PROMPT[: length + 1]) == length
            assert held(engine, length) == expected[length]
        assert len(engine._slots._last) == 32


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part", ["rows", "states"])
def test_a_flipped_byte_never_reaches_the_model(tiny: Models, tmp_path: Path, name: str, part: str) -> None:
    """llama.cpp takes a flipped byte in silence; a promote notices it and starts clean, and the next save heals it."""
    if (part == "states" and name not in PARTIAL_KINDS) or (part == "rows" and name not in ROWS_KINDS):
        part = "states" if part == "rows" else "rows"  # the only part that this model has
    prompt = PROMPT[:200]
    with (
        Store.open(tmp_path / "s", max_bytes=CAP) as store,
        running(tiny[name], name) as (context, engine),
        SessionTier(store, engine) as tier,
    ):
        context.decode(prompt, 0)
        whole = held(engine, 200)
        tier.cascade(prompt)
        tier.flush()
        with tier.namespace.lease(prompt) as lease:
            located = lease._located if part == "rows" else lease._states
            at = int(located.offset[0]) + int(located.payload_bytes[0]) // 2
        flip(data_file(tmp_path / "s"), at)
        assert tier.promote([*prompt, 1]) == context.position() == 0
        assert tier.stats.fallbacks == 1
        context.decode(prompt, 0)
        tier.cascade(prompt)
        tier.flush()
        assert tier.promote([*prompt, 1]) == 200
        assert held(engine, 200) == whole


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen3", "qwen35"])
def test_too_small_a_context_ends_clean(tiny: Models, tmp_path: Path, name: str) -> None:
    """A prefix that does not fit the context wipes llama.cpp's sequence; the promote is a miss and the engine usable."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        with running(tiny[name], name) as (context, engine), SessionTier(store, engine) as tier:
            context.decode(PROMPT, 0)
            tier.cascade(PROMPT)
        with running(tiny[name], name, n_ctx=256) as (context, engine), SessionTier(store, engine) as tier:
            context.decode(PROMPT[:40], 0)
            with tier.namespace.lease(PROMPT) as lease, pytest.raises(LlamaCppError, match="context large enough"):
                engine.apply(lease)
            engine.reset()
            assert tier.promote([*PROMPT, 1]) == context.position() == context.position(1) == 0
            assert tier.stats.faults == 1
            context.decode(PROMPT[:40], 0)
            with running(tiny[name], name, n_ctx=256) as (fresh, other):
                fresh.decode(PROMPT[:40], 0)
                assert told(fresh, other, PROMPT[40:60]) == told(context, engine, PROMPT[40:60])


def test_other_types_are_another_layout(tiny: Models, tmp_path: Path) -> None:
    """Rows of another type never meet: their layouts differ, so nothing is offered."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        with running(tiny["lfm2"], "lfm2") as (context, engine), SessionTier(store, engine) as tier:
            context.decode(PROMPT, 0)
            tier.cascade(PROMPT)
        with running(tiny["lfm2"], "lfm2", type_k="q8_0") as (_, engine), SessionTier(store, engine) as tier:
            assert tier.promote([*PROMPT, 1]) == 0


@pytest.mark.parametrize("name", WINDOW_KINDS)
def test_a_window_that_was_cut_back_is_not_saved(tiny: Models, tmp_path: Path, name: str) -> None:
    """llama.cpp cuts a restored window back and says that it did; what is gone from it is noticed, and never stored."""
    with running(tiny[name], name) as (context, engine), running(tiny[name], name) as (other, restored):
        context.decode(PROMPT, 0)
        restored.apply(Snapshot(engine, PROMPT))
        memory = Functions(other.library.c, other.pointer)
        if name == "gemma3":
            memory.remove(0, 290)  # a recurrent part would refuse it
        else:
            assert not memory._rm(memory._memory, 0, 290, -1)
            restored.reset()
            return
        assert other.position() == 290
        with pytest.raises(BlobError, match=f"holds {WINDOW - 30} of the {WINDOW} positions before 290"):
            restored.capture(0, 290)
        with Store.open(tmp_path / "s", max_bytes=CAP) as store, SessionTier(store, restored) as tier:
            assert "cut back" in tier.cascade(PROMPT[:290]).missed
            tier.flush()
            assert tier.promote([*PROMPT[:290], 1]) == other.position() == 0


@pytest.mark.parametrize("name", PARTIAL_KINDS)
def test_states_of_another_position_are_refused(tiny: Models, name: str) -> None:
    """Rows up to one position are never mixed with states of another: the engine is as it was before."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:100], 0)
        early = Snapshot(engine, PROMPT[:100])
        context.decode(PROMPT[100:200], 100)
        late = Snapshot(engine, PROMPT[:200])
        before = held(engine, 200)
        early.kept, late.kept = late.kept, early.kept
        for mixed in (early, late):
            with pytest.raises(EngineError, match="never mixed"):
                engine.apply(mixed)
        assert held(engine, 200) == before


@pytest.mark.parametrize("name", WINDOW_KINDS)
def test_a_window_that_is_not_whole_is_refused(tiny: Models, name: str) -> None:
    """A window with fewer positions than its model needs, or of different lengths by layer, is refused before it is applied."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:200], 0)
        before = held(engine, 200)
        for streams in (["k.0", "v.0", "k.1", "v.1", "k.2", "v.2", "k.3", "v.3", "k.4", "v.4"], ["v.1"]):
            snapshot = Snapshot(engine, PROMPT[:200])
            for stream in streams:
                if f"window.{stream}" in snapshot.kept:
                    snapshot.kept[f"window.{stream}"] = snapshot.kept[f"window.{stream}"][10:]
            with pytest.raises(EngineError, match=f"not all the {WINDOW} positions"):
                engine.apply(snapshot)
        assert held(engine, 200) == before


@pytest.mark.parametrize("name", ["lfm2", "mamba", "qwen35"])
def test_a_state_of_another_shape_is_refused(tiny: Models, name: str) -> None:
    """A state that would be spread over what it does not fill is refused before it is applied."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:200], 0)
        snapshot = Snapshot(engine, PROMPT[:200])
        snapshot.kept["r.1"] = snapshot.kept["r.1"][:1]
        before = held(engine, 200)
        with pytest.raises(ArrayError, match=r"r\.1"):
            engine.apply(snapshot)
        assert held(engine, 200) == before


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "lfm2-window", "qwen35"])
@pytest.mark.parametrize("settings", [{"unified": False}, {"n_seq_max": 1}], ids=str)
def test_contexts_that_cannot_share_cells_are_refused(tiny: Models, name: str, settings: dict[str, Any]) -> None:
    """A context that is not unified, or has one sequence, is refused at construction with the settings it needs."""
    with Context(tiny[name], 256, threads=1, **settings) as context:
        for probe in (context.probe, None):
            if probe is None:
                context.decode(PROMPT[:8], 0)
            with pytest.raises(LayoutError, match="kv_unified = true and n_seq_max >= 2"):
                engine_on(context, name, probe=probe)


@pytest.mark.parametrize("version", [3, 4])
def test_rotation_is_identity(version: int) -> None:
    """Rows of another rotation, which older builds take in silence, are of another layout."""
    made = [blob(range(2), version=version) for _ in range(2)]
    if version == 4:
        at = 16 + 2 * 12 + 8
        assert struct.unpack_from("<II", made[1].data, at) == (64, 64)
        struct.pack_into("<I", made[1].data, at, 0)
    named = [learn(each, 1).identity() for each in made]
    assert (named[0] == named[1]) == (version == 3)
    assert named[0]["llamacpp.rotation_k"] == (64 if version == 4 else 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_scratch_sequence_in_use_is_refused(tiny: Models, name: str) -> None:
    """The engine never clears a scratch sequence that somebody else has filled, when it saves nor when it restores."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:30], 0)
        snapshot = Snapshot(engine, PROMPT[:30])
        context.decode(PROMPT[:4], 0, seq=1)
        for use in (lambda: engine.capture(0, 30), lambda: engine.apply(snapshot)):
            with pytest.raises(EngineError, match="nobody else uses"):
                use()
        assert (context.position(), context.position(1)) == (30, 4)


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_rows_alone_in_the_scratch_sequence_are_noticed(tiny: Models, name: str) -> None:
    """A scratch sequence that holds rows and no recurrent state looks empty by its positions, and is refused all the same."""
    with running(tiny[name], name, n_seq_max=3) as (context, engine):
        context.decode(PROMPT[:30], 0)
        snapshot = Snapshot(engine, PROMPT[:30])
        memory = Functions(context.library.c, context.pointer)
        memory.copy(0, 1, 0, 10)
        memory.copy(2, 1, 0, 10)  # from an empty sequence: nothing of the rows, and no recurrent state in place of the one
        assert context.position(1) == 0
        with pytest.raises(EngineError, match="nobody else uses"):
            engine.apply(snapshot)


@pytest.mark.parametrize("name", ["lfm2", "lfm2-window", "mamba", "qwen35"])
def test_a_recurrent_sequence_that_cannot_be_cut_is_cleared(tiny: Models, name: str) -> None:
    """llama.cpp refuses to cut recurrent state back; a reset removes the whole sequence, and what follows is as from the start."""
    with running(tiny[name], name) as (context, engine):
        context.decode(PROMPT[:50], 0)
        with pytest.raises(DriverError, match="cannot be cut"):
            context.truncate(20)
        engine.reset()
        assert context.position() == 0
        context.decode(PROMPT[:50], 0)
        with running(tiny[name], name) as (fresh, other):
            fresh.decode(PROMPT[:50], 0)
            assert told(context, engine, PROMPT[50:80]) == told(fresh, other, PROMPT[50:80])
