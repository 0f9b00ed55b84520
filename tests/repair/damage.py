"""Damaging a store's file, looking at its pages, and comparing what is restored with all that was ever saved."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvstore import Namespace, Store
from kvstore.errors import BlockDamaged
from kvstore.testing import destination, session_rows, session_states, states_equal
from tests.support import assert_sound, data_file

PAGE = 32768
LEAF, BRANCH, OVERFLOW = 0x02, 0x01, 0x04


def write_at(path: Path, at: int, raw: bytes) -> None:
    """Put bytes into a store's data file."""
    with data_file(path).open("r+b") as file:
        file.seek(at)
        file.write(raw)


def zero(path: Path, page: int, pages: int = 1) -> None:
    """Lose pages of a store's data file: they become zeros."""
    write_at(path, page * PAGE, bytes(pages * PAGE))


def pages_of(path: Path, flags: int) -> list[int]:
    """Give the numbers of the pages whose headers say so; some are free by now."""
    raw = data_file(path).read_bytes()
    numbers = range(2, len(raw) // PAGE)
    return [
        n
        for n in numbers
        if int.from_bytes(raw[n * PAGE : n * PAGE + 8], "little") == n
        and int.from_bytes(raw[n * PAGE + 10 : n * PAGE + 12], "little") == flags
    ]


def pages_with(path: Path, record: bytes) -> list[int]:
    """Give the numbers of the pages in which these bytes stand."""
    raw = data_file(path).read_bytes()
    return [n for n in range(len(raw) // PAGE) if record in raw[n * PAGE : (n + 1) * PAGE]]


def repaired(path: Path, **options: object) -> int:
    """Repair a store. It has to be sound then, within its cap, and there has to be nothing left to repair; give the tokens kept."""
    done = Store.repair(path, **options)  # type: ignore[arg-type]  # what the tests pass
    with Store.open(path) as store:
        assert_sound(store)
        assert store.max_bytes == done.max_bytes
        assert store.stats().file_bytes <= store.max_bytes
    again = Store.repair(path)
    assert again.ok
    assert not again.changed
    assert again.tokens_kept == done.tokens_kept
    assert not os.path.lexists(path.parent / f".{path.name}.repair")
    return done.tokens_kept


def restored_from_any(namespace: Namespace, tokens: list[int], writers: Iterable[int]) -> int:
    """Restore what a lease offers; each row has to be one that one of the writers has saved for exactly these tokens."""
    layout = namespace.layout
    with namespace.lease(tokens) as lease:
        if not lease:
            return 0
        into = destination(layout, lease.length)
        lease.copy_into(into)
        lease.validate()
        prompt = tokens[: lease.length]
        saved = [session_rows(layout, prompt, writer=writer) for writer in writers]
        for stream in layout.streams:
            got = np.moveaxis(into[stream.name], stream.token_axis, 0)
            known = [np.moveaxis(rows[stream.name], stream.token_axis, 0) for rows in saved]
            for row in range(stream.rows(lease.length)):
                assert any(got[row].tobytes() == rows[row].tobytes() for rows in known), (stream.name, row)
        if layout.states:
            given = lease.states()
            assert any(states_equal(given, session_states(layout, prompt, writer=writer)) for writer in writers)
        return lease.length


def restored_after_all(namespace: Namespace, tokens: list[int], writers: Iterable[int] = (0,)) -> int:
    """As `restored_from_any`, where damage may be met and is refused."""
    for _ in range(100):
        try:
            return restored_from_any(namespace, tokens, writers)
        except BlockDamaged:
            continue
    raise AssertionError("damage is not refused")
