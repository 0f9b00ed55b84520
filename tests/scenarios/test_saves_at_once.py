"""Two processes that save at once: the same session piece by piece, and two sessions in a store that barely holds them both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import Layout, Store, Stream
from tests.support import assert_sound, run_child, wide_layout

from .conftest import Acting
from .steps import Actor

LENGTH = 100_000
THIN = Layout((Stream("k", "u8", (32,)),), block_tokens=512, model="thin")

SETUP = """
import kvstore.saving.save as saving
from tests.scenarios.test_saves_at_once import THIN, rows_of, tokens_of
tokens = tokens_of(100_000)
namespace = store.namespace(THIN)
halt(saving, 'publish_piece', call=0)
"""


def tokens_of(length: int) -> Any:
    """The tokens of the long session."""
    return np.arange(length, dtype=np.uint32) * 7919 % 1009


def rows_of(tokens: Any, writer: int) -> dict[str, Any]:
    """Rows that are quick to make up: each depends on its token, its position and its writer."""
    position = np.arange(tokens.size)[:, None]
    row = (position * 31 + tokens[:, None] * 7 + np.arange(32) * 3 + writer * 89) % 251
    return {"k": row.astype(np.uint8)}


def turns(savers: list[Actor], order: list[int]) -> list[str]:
    """Let savers that halt before each piece go on by turns, one at a time, in this order again and again; gives their answers."""
    says = [saver.next() for saver in savers]
    steps = 0
    while "at publish_piece" in says:
        who = order[steps % len(order)]
        steps += 1
        if says[who] == "at publish_piece":
            savers[who].go()
            says[who] = savers[who].next()
    assert steps > 10
    return says


@pytest.mark.parametrize(
    "order", [[0, 1], [0, 1, 1], [0, 0, 0, 1]], ids=["in turns", "the second is faster", "the first is faster"]
)
def test_the_same_long_session_in_pieces(store: Store, actor: Acting, order: list[int]) -> None:
    """Two processes save the same session of 100,000 tokens piece by piece, other bits each: one copy, two successes."""
    savers = [actor(SETUP), actor(SETUP)]
    for writer, saver in enumerate(savers):
        saver.start(f"namespace.save(tokens, rows_of(tokens, {writer})).tokens")
    assert turns(savers, order) == ["did 100000", "did 100000"]
    stats = store.stats()
    assert (stats.blocks, stats.payload_bytes) == (196, THIN.payload_bytes(512) * 195 + THIN.payload_bytes(LENGTH % 512))
    assert_sound(store)
    tokens = tokens_of(LENGTH)
    into = np.zeros((LENGTH, 32), np.uint8)
    with store.namespace(THIN).lease(tokens) as lease:
        assert lease.length == LENGTH
        lease.copy_into({"k": into})
    rows = [rows_of(tokens, writer)["k"] for writer in range(2)]
    mine = [(into == rows[writer]).all(axis=1) for writer in range(2)]
    assert (mine[0] ^ mine[1]).all()  # each row is that of one of them
    assert mine[0].any()
    whole = [mine[0][at : at + 512] for at in range(0, LENGTH, 512)]
    assert all(block.all() or not block.any() for block in whole)


FULL = """
import kvstore.saving.save as saving
namespace = store.namespace(wide_layout())
halt(saving, 'publish_piece', call=0)
def long_save(who, length):
    tokens = [who, *range(1, length)]
    return namespace.save(tokens, session_rows(wide_layout(), tokens)).tokens
"""
CHECK = """
with Store.open(path) as store:
    namespace = store.namespace(wide_layout())
    for who in (1, 2):
        print(restored(namespace, [who, *range(1, int(sys.argv[2]))]))
    assert_sound(store)
"""


@pytest.mark.parametrize("length", [1300, 1500, 2500])
@pytest.mark.parametrize("order", [[0, 1], [0, 0, 0, 1]], ids=["in turns", "the first is faster"])
def test_two_long_saves_in_a_store_that_barely_holds_them(store: Store, actor: Acting, length: int, order: list[int]) -> None:
    """Two long saves at once, of which both, barely both, or one alone fits: neither is in the other's way while it gets on.

    Each ends whole, or by name where there is nobody else to evict; what is there has no wrong row.
    """
    savers = [actor(FULL), actor(FULL)]
    for who, saver in enumerate(savers, start=1):
        saver.start(f"long_save({who}, {length})")
    answers = turns(savers, order)
    assert_sound(store)
    stats = store.stats()
    assert stats.live_bytes <= stats.limit_bytes
    held = [int(line) for line in run_child(CHECK, store.path, str(length)).split()]
    for answer, found in zip(answers, held, strict=True):
        if not answer.startswith("did"):
            assert answer.startswith("failed StoreFullError: the save needs")
            assert found < length
    if length == 1300:  # both fit
        assert (answers, held) == ([f"did {length}"] * 2, [length] * 2)
    assert any(answer == f"did {length}" and found == length for answer, found in zip(answers, held, strict=True))
    assert store.namespace(wide_layout()).evict().tokens == sum(held)
    assert store.stats().blocks == 0
