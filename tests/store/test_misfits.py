"""Arguments that do not fit: refused by name, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import KVStoreError, Namespace, Store
from kvstore.errors import ArrayError, TokensError
from kvstore.testing import session_rows, session_states
from tests.support import assert_restores, hybrid_layout, save

TOKENS = list(range(40))
Arrays = dict[str, Any]


def _rows(change: Callable[[Arrays], object]) -> Arrays:
    rows: Arrays = session_rows(hybrid_layout(), [*TOKENS, 1, 2])
    change(rows)
    return rows


def _states(change: Callable[[Arrays], object]) -> Arrays:
    states: Arrays = session_states(hybrid_layout(), [*TOKENS, 1, 2])
    change(states)
    return states


ROWS: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "missing": (lambda a: a.pop("v"), "missing.*'v'"),
    "unknown": (lambda a: a.update(x=a["v"]), "unknown.*'x'"),
    "a state among them": (lambda a: a.update(r=np.zeros((6, 5), np.float32)), "unknown.*'r'"),
    "short": (lambda a: a.update(v=a["v"][:-1]), r"'v'.*\(42, 9\).*\(41, 9\)"),
    "long": (lambda a: a.update(v=np.concatenate([a["v"], a["v"][:1]])), r"'v'.*\(42, 9\).*\(43, 9\)"),
    "empty": (lambda a: a.update(v=a["v"][:0]), r"'v'.*\(0, 9\)"),
    "row shape": (lambda a: a.update(v=a["v"][:, :8]), r"'v'.*\(42, 8\)"),
    "rank": (lambda a: a.update(v=a["v"].reshape(-1)), r"'v'.*\(378,\)"),
    "axes swapped": (lambda a: a.update(k=np.moveaxis(a["k"], 1, 0)), r"'k'.*\(42, 2, 6\)"),
    "dtype of the same size": (lambda a: a.update(v=a["v"].view(np.uint8)), r"'v'.*i8.*uint8"),
    "wider dtype": (lambda a: a.update(v=a["v"].astype(np.int16)), r"'v'.*i8.*int16"),
    "byte order": (lambda a: a.update(k=a["k"].astype(">u2")), r"'k'.*bf16.*>u2"),
    "object": (lambda a: a.update(v=a["v"].astype(object)), r"'v'.*object"),
    "list": (lambda a: a.update(v=a["v"].tolist()), r"'v'.*list"),
    "none": (lambda a: a.update(v=None), r"'v'.*NoneType"),
}

STATES: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "missing": (lambda a: a.pop("r"), "missing.*'r'"),
    "none of them": (lambda a: a.clear(), "missing.*'blob'.*'r'.*'window'"),
    "unknown": (lambda a: a.update(x=a["r"]), "unknown.*'x'"),
    "shape": (lambda a: a.update(r=a["r"][:5]), r"'r'.*\(6, 5\).*\(5, 5\)"),
    "beyond the bound": (lambda a: a.update(blob=np.zeros(101, np.uint8)), r"'blob'.*\(100,\).*\(101,\)"),
    "unbounded axis": (lambda a: a.update(window=np.zeros((2, 7), np.float16)), r"'window'.*\(2, 7\)"),
    "dtype": (lambda a: a.update(blob=np.zeros(5, np.int8)), r"'blob'.*u8.*int8"),
    "bytes": (lambda a: a.update(blob=b"12345"), r"'blob'.*bytes"),
}


@pytest.fixture
def namespace(store: Store) -> Namespace:
    """Make a namespace that holds a session."""
    made = store.namespace(hybrid_layout())
    save(made, TOKENS)
    return made


def assert_unchanged(store: Store, namespace: Namespace) -> None:
    """Require that the store holds what the fixture saved and nothing else."""
    stats = store.stats()
    assert (stats.nodes, stats.blocks, stats.counters.saves) == (1, 4, 1)
    assert_restores(namespace, [*TOKENS, 1, 2], 40)


@pytest.mark.parametrize("case", sorted(ROWS))
def test_rows_that_do_not_fit(store: Store, namespace: Namespace, case: str) -> None:
    """Streams that are missing, unknown or of another shape or dtype are refused, naming the stream and both sides."""
    change, text = ROWS[case]
    with pytest.raises(ArrayError, match=text) as caught:
        namespace.save([*TOKENS, 1, 2], _rows(change), states=_states(lambda _: None))
    assert isinstance(caught.value, ValueError)
    assert_unchanged(store, namespace)


@pytest.mark.parametrize("case", sorted(STATES))
def test_states_that_do_not_fit(store: Store, namespace: Namespace, case: str) -> None:
    """States that are missing, unknown, beyond their bounds or of another dtype are refused, naming the state."""
    change, text = STATES[case]
    with pytest.raises(ArrayError, match=text):
        namespace.save([*TOKENS, 1, 2], _rows(lambda _: None), states=_states(change))
    assert_unchanged(store, namespace)


@pytest.mark.parametrize("start", [1, 15, -16, 48, 1 << 40, 16.0, "0", None, True])
def test_a_start_that_is_no_block_boundary(store: Store, namespace: Namespace, start: Any) -> None:
    """A start that is not a multiple of block_tokens inside the session is refused with the multiple."""
    with pytest.raises(ArrayError, match="multiple of block_tokens \\(16\\)"):
        namespace.save([*TOKENS, 1, 2], _rows(lambda _: None), start=start)
    assert_unchanged(store, namespace)


def test_rows_that_do_not_belong_to_the_start(store: Store, namespace: Namespace) -> None:
    """Rows of the whole session, given with a start, don't have the number that is expected then."""
    with pytest.raises(ArrayError, match="26 tokens"):
        namespace.save([*TOKENS, 1, 2], _rows(lambda _: None), start=16)
    assert_unchanged(store, namespace)


NO_TOKENS: list[Any] = [[], [-1], [1 << 32], [[1]], [1.5], ["a"], 7]


@pytest.mark.parametrize("tokens", NO_TOKENS, ids=repr)
@pytest.mark.parametrize("call", ["save", "match", "lease", "evict"])
def test_tokens_that_are_none(store: Store, namespace: Namespace, tokens: Any, call: str) -> None:
    """Every call refuses what is no token array, and changes nothing."""
    with pytest.raises(TokensError) as caught:
        namespace.save(tokens, {}) if call == "save" else getattr(namespace, call)(tokens)
    assert isinstance(caught.value, KVStoreError)
    assert_unchanged(store, namespace)


def test_rows_of_any_strides_are_taken(store: Store) -> None:
    """Arrays that are slices, transposed, reversed or read-only are saved as their values."""
    namespace = store.namespace(hybrid_layout())
    rows = session_rows(hybrid_layout(), TOKENS)
    spread = np.zeros((80, 9), np.int8)
    spread[::2] = rows["v"]
    k = np.asfortranarray(rows["k"])[:, ::-1][:, ::-1]
    k.flags.writeable = False
    namespace.save(TOKENS, {"v": spread[::2], "k": k}, states=session_states(hybrid_layout(), TOKENS))
    assert_restores(namespace, TOKENS, 40)
