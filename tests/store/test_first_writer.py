"""Equal tokens share bytes: the first writer's stay, and only what is new is written."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import Store
from kvstore.errors import BaseLost
from kvstore.testing import destination, session_rows
from tests.support import assert_restores, hybrid_layout, plain_layout, save, wide_layout

TOKENS = list(range(40))


def test_the_first_writers_bytes_stay(store: Store) -> None:
    """The same tokens saved again with other bytes are a success that writes nothing, and what was first saved comes back."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS, writer=1)
    again = save(namespace, TOKENS, writer=2)
    assert (again.new_tokens, again.written_bytes) == (0, 0)
    assert_restores(namespace, TOKENS, 40, writer=1)


@pytest.mark.parametrize("base", [5, 16, 21, 32, 39])
def test_an_extension_by_another_writer_keeps_the_first_rows(store: Store, base: int) -> None:
    """A second writer that goes on adds its rows behind the first one's, inside the tail's block too."""
    namespace = store.namespace(plain_layout())
    layout = namespace.layout
    save(namespace, TOKENS[:base], writer=1)
    result = save(namespace, TOKENS, writer=2)
    assert (result.stored_tokens, result.new_tokens) == (base, 40 - base)
    into = destination(layout, 40)
    with namespace.lease(TOKENS) as lease:
        assert lease.length == 40
        lease.copy_into(into)
    first, second = session_rows(layout, TOKENS, writer=1), session_rows(layout, TOKENS, writer=2)
    for stream in layout.streams:
        rows = stream.rows(base)
        index = np.arange(stream.rows(40))
        for got, expected in ((index[:rows], first), (index[rows:], second)):
            assert (
                np.take(into[stream.name], got, stream.token_axis).tobytes()
                == np.take(expected[stream.name], got, stream.token_axis).tobytes()
            )


def test_a_branch_by_another_writer_keeps_the_first_rows(store: Store) -> None:
    """A second writer that parts inside a block has the first one's rows up to there, and its own behind."""
    namespace = store.namespace(plain_layout())
    layout = namespace.layout
    save(namespace, TOKENS, writer=1)
    branch = [*TOKENS[:21], *[77] * 9]
    save(namespace, branch, writer=2)
    into = destination(layout, 30)
    with namespace.lease(branch) as lease:
        assert lease.length == 30
        lease.copy_into(into)
    assert into["v"][:21].tobytes() == session_rows(layout, TOKENS, writer=1)["v"][:21].tobytes()
    assert into["v"][21:].tobytes() == session_rows(layout, branch, writer=2)["v"][21:].tobytes()
    assert_restores(namespace, TOKENS, 40, writer=1)


@pytest.mark.parametrize("changed", [[], [0], [16], [33], [0, 20, 39]])
def test_check_reports_exactly_the_blocks_that_differ(store: Store, changed: list[int]) -> None:
    """With check=True a save says how many stored blocks it compared and at which positions those begin that differ."""
    namespace = store.namespace(plain_layout())
    layout = namespace.layout
    save(namespace, TOKENS)
    arrays = session_rows(layout, [*TOKENS, 1, 2])
    for position in changed:
        arrays["v"][position, 2] ^= 1
    result = namespace.save([*TOKENS, 1, 2], arrays, check=True)
    assert result.checked_blocks == 3
    assert result.differing_blocks == tuple(sorted({position // 16 * 16 for position in changed}))
    assert result.new_tokens == 2


def test_check_compares_only_what_is_given_and_stored(store: Store) -> None:
    """Blocks before `start`, and rows that are not stored yet, are not compared."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS[:20], writer=1)
    result = save(namespace, TOKENS, writer=2, start=16, check=True)
    assert (result.checked_blocks, result.differing_blocks) == (1, (16,))
    assert save(namespace, [9] * 30, check=True).checked_blocks == 0


def test_check_names_a_block_in_any_stream(store: Store) -> None:
    """One changed byte in whichever stream, the strided one included, is a differing block."""
    namespace = store.namespace(plain_layout())
    layout = namespace.layout
    save(namespace, TOKENS)
    for stream in layout.streams:
        arrays = session_rows(layout, TOKENS)
        raw = np.moveaxis(arrays[stream.name], stream.token_axis, 0)[stream.rows(20)]
        raw[...] = np.frombuffer(bytes(b ^ 255 for b in raw.tobytes()), raw.dtype).reshape(raw.shape)
        assert namespace.save(TOKENS, arrays, check=True).differing_blocks == (16,), stream.name


def test_a_shared_prefix_is_written_once(store: Store) -> None:
    """A second session with a shared prefix writes its own blocks only, whatever the prefix weighs."""
    namespace = store.namespace(wide_layout())
    shared = list(range(256))
    first = save(namespace, [*shared, *[1] * 64])
    second = save(namespace, [*shared, *[2] * 64])
    assert first.new_blocks == 5
    assert second.new_blocks == 1
    assert second.written_bytes < first.written_bytes / 4
    assert store.stats().payload_bytes == (256 + 64 + 64) * 4096


def test_written_bytes_of_a_turn(store: Store) -> None:
    """A turn writes the blocks it completes and its tail, not what came before."""
    namespace = store.namespace(wide_layout())
    save(namespace, list(range(200)))
    result = save(namespace, list(range(270)), start=192)
    assert result.new_blocks == 2  # [192, 256) and the tail [256, 270)
    assert result.written_bytes <= (64 + 14) * 4096 + 3 * 32768


def test_rows_that_do_not_reach_back_are_refused(store: Store) -> None:
    """Arrays that start behind what is stored raise BaseLost with the position from which rows are needed; nothing changes."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS[:20])
    with pytest.raises(BaseLost, match="from 16 on") as caught:
        save(namespace, TOKENS, start=32)
    assert isinstance(caught.value, LookupError)
    assert_restores(namespace, TOKENS, 20)
    save(namespace, TOKENS, start=16)
    assert_restores(namespace, TOKENS, 40)
    with pytest.raises(BaseLost):
        save(namespace, [5] * 40, start=16)


def test_a_start_inside_what_is_stored_will_do(store: Store) -> None:
    """Arrays may start anywhere on a block boundary at or before the end of what is stored."""
    namespace = store.namespace(hybrid_layout())
    save(namespace, TOKENS)
    for start in (0, 16, 32):
        tokens = [*TOKENS, start, 1]
        assert save(namespace, tokens, start=start).stored_tokens == 40
        assert_restores(namespace, tokens, 42)
    assert save(namespace, TOKENS[:32], start=32).new_tokens == 0  # no rows at all: states alone
