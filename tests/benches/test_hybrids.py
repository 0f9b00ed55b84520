"""The hybrid model that is measured: its states differ everywhere, its rows go on where they ended, its bytes are told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benches.conversation import Conversation, talk
from benches.harness import Context
from benches.hybrids import Hybrid, HybridEngine
from benches.sessions import Array, random_tokens, touched
from kvstore import Store

MODEL = Hybrid(1, "f16")
TALK = Conversation(first=200, user=50, hidden=30, answer=20, turns=4)


def pieces(states: dict[str, Array]) -> set[bytes]:
    """All runs of 4 KiB of some states."""
    raw = [array.tobytes() for array in states.values()]
    return {data[at : at + 4096] for data in raw for at in range(0, len(data), 4096)}


@pytest.mark.parametrize(("position", "seed"), [(701, 1), (700, 2)])
def test_states_of_two_positions_share_nothing(position: int, seed: int) -> None:
    """So no block of a checkpoint is another's too, which would make checkpoints look smaller than they are."""
    states = MODEL.states(700, 1)
    assert sum(array.nbytes for array in states.values()) > 1 << 20
    assert pieces(states).isdisjoint(pieces(MODEL.states(position, seed)))
    assert states["index_tail"].shape[0] == 700 % 64
    assert states["window"].shape[0] == 512
    for state in MODEL.layout().states:
        state.check_array(states[state.name])


def test_rows_go_on_where_they_ended() -> None:
    """A part that is computed later leaves earlier rows alone, completes rows of the index, and counts what is new."""
    layout = MODEL.layout()
    engine = HybridEngine(MODEL, 400)
    first = engine.compute(150, seed=1)
    before = {s.name: engine.streams[s.name][: s.rows(150)].copy() for s in layout.streams}
    then = engine.compute(400, seed=2)
    assert first + then == sum(s.rows(400) * s.row_bytes for s in layout.streams)
    assert all(engine.streams[name][: rows.shape[0]].tobytes() == rows.tobytes() for name, rows in before.items())
    untouched = touched(layout, 400)
    assert all(engine.streams[s.name][-1].tobytes() != untouched[s.name][-1].tobytes() for s in layout.streams)


def test_a_session_comes_back_whole(tmp_path: Path) -> None:
    """The engine is one that a tier can use: what it restores is what it held, states of bounded shape among it."""
    engine = HybridEngine(MODEL, 300)
    engine.compute(300, seed=5)
    prompt = random_tokens(1, 300)
    with Store.open(tmp_path / "store", max_bytes=64 << 20) as store:
        namespace = store.namespace(MODEL.layout())
        namespace.save(prompt, engine.streams, states=engine.states)
        other = HybridEngine(MODEL, 300)
        with namespace.lease(prompt) as lease:
            other.apply(lease)
    assert other.position == 300
    for name, array in {**engine.streams, **engine.states}.items():
        assert np.array_equal({**other.streams, **other.states}[name].view(np.uint8), array.view(np.uint8))


@pytest.fixture
def context(tmp_path: Path) -> Callable[[], Context]:
    """Makes what a workload runs in."""
    return lambda: Context(tmp_path, "smallest", lambda line: None)


@pytest.mark.parametrize("branches", [False, True])
def test_bytes_of_states_are_told_from_rows(branches: bool, context: Callable[[], Context]) -> None:
    """What a conversation's checkpoints take is the bytes of its last two, to their alignment, and rows are none of it."""
    kept = 2
    found = talk(context(), TALK, MODEL, branches=branches)
    assert (found.saved, found.kept) == (2 * TALK.turns, kept)
    ends = [TALK.first + turn * (50 + (20 if branches else 50)) + 50 for turn in range(TALK.turns)]
    positions = sorted([*ends, *(end + 50 for end in ends)])[-kept:]
    sizes = [sum(array.nbytes for array in MODEL.states(position, 0).values()) for position in positions]
    assert sum(sizes) <= found.states_bytes <= sum(sizes) + kept * 64 * 80
    assert found.checkpoint == sum(array.nbytes for array in MODEL.states(positions[-1], 0).values())
    assert len(found.returned) == len(found.durable) == len(found.plain) == found.saved - 1
    assert found.handed > found.new
