"""The oracle covers every kind of part, names the one that differs, and says which of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

from kvstore import Layout, State, Stream, state_hash
from kvstore.testing import SyntheticHybrid, differences, hybrid_layout
from kvstore.testing.hybrid import KVFormat

from .drivers import made_up

LENGTH = 150  # two pooled rows, and a tail of 22 keys


def read(kv: KVFormat, length: int = LENGTH) -> dict[str, Any]:
    """Copies of all that a hybrid holds after `length` tokens."""
    engine = SyntheticHybrid(kv, capacity=256)
    engine.feed(made_up(length, 1))
    return {name: np.array(array) for name, array in engine.parts().items()}


@pytest.mark.parametrize("kv", ["int8", "int4", "f16"])
def test_one_bit_of_each_part(kv: KVFormat) -> None:
    """One bit, in the first or the last row of a stream or anywhere in a state, changes the hash of that part and of no other."""
    layout, held = hybrid_layout(kv, positions=256), read(kv)
    whole = state_hash(layout, held, LENGTH)
    assert [name for name, _ in whole.parts] == [s.name for s in layout.streams] + [s.name for s in layout.states]
    for stream in layout.streams:
        rows = stream.rows(LENGTH)
        for row in (0, rows - 1):
            changed = held[stream.name].copy()
            one = np.moveaxis(changed, stream.token_axis, 0)[row : row + 1]
            raw = np.array(one, order="C").reshape(-1)
            raw.view(np.uint8)[-1] ^= 1
            one[...] = raw.reshape(one.shape)
            other = {**held, stream.name: changed}
            assert whole.differing(state_hash(layout, other, LENGTH)) == (stream.name,)
            [found] = differences(layout, held, other, LENGTH)
            assert (found.part, found.rows, found.of) == (stream.name, (row,), rows)
            assert f"row {row}" in str(found)
    for state in layout.states:
        changed = held[state.name].copy()
        changed.reshape(-1).view(np.uint8)[-1] ^= 1
        other = {**held, state.name: changed}
        assert whole.differing(state_hash(layout, other, LENGTH)) == (state.name,)
        [found] = differences(layout, held, other, LENGTH)
        assert (found.part, found.rows) == (state.name, ())
        assert f"1 of {changed.nbytes} bytes" in str(found)
    assert differences(layout, held, held, LENGTH) == ()


def test_rows_behind_the_end_do_not_count() -> None:
    """What lies behind the rows of a length, in a strided stream behind the completed spans, is nobody's."""
    layout, held = hybrid_layout(positions=256), read("int8")
    changed = {name: array.copy() for name, array in held.items()}
    for stream in layout.streams:
        np.moveaxis(changed[stream.name], stream.token_axis, 0)[stream.rows(LENGTH) :] = 1
    assert state_hash(layout, changed, LENGTH) == state_hash(layout, held, LENGTH)
    assert differences(layout, held, changed, LENGTH) == ()


def test_rows_that_are_shifted_by_one() -> None:
    """A drafter's rows that lie one off, as without the convention of shifted rows, are told from the right ones."""
    layout, held = hybrid_layout(positions=256), read("int8")
    assert not held["drafter.k"][0].any()
    shifted = {**held, "drafter.k": np.roll(held["drafter.k"], -1, axis=0)}
    assert state_hash(layout, held, LENGTH).differing(state_hash(layout, shifted, LENGTH)) == ("drafter.k",)
    [found] = differences(layout, held, shifted, LENGTH)
    assert (found.part, found.rows[0]) == ("drafter.k", 0)


def test_a_bounded_state_of_another_extent() -> None:
    """A window or tail that is longer or shorter differs, whatever its bytes: an empty one from one of another shape too."""
    layout = hybrid_layout(positions=256)
    held, later = read("int8"), read("int8", LENGTH + 1)
    other = {**held, "index.tail": later["index.tail"]}
    assert later["index.tail"][:-1].tobytes() == held["index.tail"].tobytes()
    assert state_hash(layout, held, LENGTH).differing(state_hash(layout, other, LENGTH)) == ("index.tail",)
    assert str(differences(layout, held, other, LENGTH)[0]) == "index.tail (shape (22, 8) against (23, 8))"
    window = Layout((), (State("w", "u8", (4, 4), (0, 1)),))
    shapes = [state_hash(window, {"w": np.zeros(shape, np.uint8)}, 1) for shape in ((0, 3), (3, 0), (0, 0))]
    assert len(set(shapes)) == 3


def test_a_span_is_named_by_its_positions() -> None:
    """For a strided stream the message says which positions its row stands for; rows before `start` are left out."""
    layout, held = hybrid_layout(positions=256), read("int8")
    changed = {**held, "index.pooled": held["index.pooled"].copy()}
    changed["index.pooled"][1] += 1
    assert str(differences(layout, held, changed, LENGTH)[0]) == "index.pooled (row 1, positions from 64 on; 1 of 2 rows)"
    assert len(differences(layout, held, changed, LENGTH, start=127)) == 1
    assert differences(layout, held, changed, LENGTH, start=128) == ()


def test_extension_types() -> None:
    """Arrays of ml_dtypes' types hash as their bits do."""
    layout = Layout((Stream("k", "bf16", (2,)), Stream("f", "f8_e4m3", (2,))), (State("s", "bf16", (3,)),), block_tokens=4)
    held = {"k": np.ones((5, 2), bfloat16), "f": np.ones((5, 2), float8_e4m3fn), "s": np.ones(3, bfloat16)}
    bits = {name: array.view(f"u{array.itemsize}").copy() for name, array in held.items()}
    assert state_hash(layout, held, 5) == state_hash(layout, bits, 5)
    held["s"][1] = 2
    assert state_hash(layout, held, 5).differing(state_hash(layout, bits, 5)) == ("s",)
