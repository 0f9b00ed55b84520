"""Records that are in the file and not in the store: never committed, superseded, or evicted. None of them comes back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore import Namespace, Store, as_tokens
from kvstore.blocks import put
from kvstore.env import Writer
from kvstore.ids import token_bytes
from kvstore.radix import grow
from kvstore.records.node import Node, child_key
from kvstore.saving.gather import gather_rows
from kvstore.testing import session_rows
from tests.repair.damage import BRANCH, LEAF, PAGE, pages_of, pages_with, repaired, restored_after_all, write_at, zero
from tests.store.index import all_nodes
from tests.support import CAP, data_file, examples, plain_layout, save

STEM = list(range(32))
FIRST, SECOND = [41] * 16, [42] * 16  # what two lives of the same node went on with, up to the same position
LAST_PAGE = 16 + 24 + 2 * 48  # where a meta page says how far its snapshot goes
ENDS = [[n] * 16 for n in (51, 52, 53)]


def save_at_once(namespace: Namespace, sessions: list[list[int]], ahead: list[int] | None = None) -> None:
    """Save sessions in one transaction, which no call does: so all of it can be undone by undoing one.

    The blocks of `ahead` are put before them, so that the index's pages come to lie where those of another transaction don't.
    """
    scope = namespace.scope
    prepared = [gather_rows(scope, session_rows(scope.layout, tokens), 0, 0, len(tokens)) for tokens in sessions]

    first = gather_rows(scope, session_rows(scope.layout, ahead), 0, 0, len(ahead)) if ahead else {}

    def work(txn: Writer) -> None:
        for block in first.values():
            put(txn, block)
        for tokens, blocks in zip(sessions, prepared, strict=True):
            grow(txn, scope.ensure_root(txn), token_bytes(as_tokens(tokens)), blocks, scope.limit, frozenset())

    scope.store.transact(work)


def ever_saved(path: Path) -> Node:
    """Make a store with remains of transactions that never were: a writer was killed before their meta page.

    The remains say that a node goes on with FIRST, and have three children of it; the store says that the same node goes on with
    SECOND, and has two. Gives the child that never was: its parent's id and its position are those of a node that is there.
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, STEM)
        for n in range(6):  # for free pages, among which the remains will lie
            save(namespace, [8, *range(n, 200)])
        namespace.evict([8, *range(5, 200)])
        for n in range(5):
            namespace.evict([8, *range(n, 200)])
        for n in (1, 2):
            save(namespace, [7, n])
    metas = data_file(path).read_bytes()[: 2 * PAGE]
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        save_at_once(namespace, [[*STEM, *FIRST, *end] for end in ENDS], ahead=[9, *range(150)])
        never = next(node for node in all_nodes(namespace) if node.first == ENDS[2][0])
    write_at(path, 0, metas)
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        save_at_once(namespace, [[*STEM, *SECOND, *end] for end in (ENDS[0], ENDS[1])])
        there = next(node for node in all_nodes(namespace) if node.node == never.parent)
        assert there.end == never.start
        assert there.tokens == token_bytes(as_tokens([*STEM, *SECOND]))
    found = pages_with(path, never.encode())
    last = int.from_bytes(data_file(path).read_bytes()[LAST_PAGE : LAST_PAGE + 8], "little")
    assert found, "what never was is not in the file: the test shows nothing"
    assert max(found) <= last
    return never


def check(path: Path) -> list[int]:
    """Restore whatever could come back; what never was must not."""
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        kept = [restored_after_all(namespace, [*STEM, *SECOND, *end]) for end in ENDS]
        assert kept[2] <= 48
        assert restored_after_all(namespace, [*STEM, *FIRST, *ENDS[2]]) <= 32
        return kept


def test_what_was_never_committed(tmp_path: Path) -> None:
    """Whichever page of the index is lost, a record of a transaction that never was is not taken for one of the store."""
    path = tmp_path / "s"
    ever_saved(path)
    raw = data_file(path).read_bytes()
    complete = 0
    for page in [0, 1, *pages_of(path, LEAF), *pages_of(path, BRANCH)]:
        data_file(path).write_bytes(raw)
        zero(path, page)
        repaired(path)
        complete += check(path)[:2] == [64, 64]
    assert complete > 3
    data_file(path).write_bytes(raw)
    zero(path, 0, 2)
    repaired(path)
    assert check(path)[:2] == [64, 64]


def test_what_was_never_committed_with_two_pages_lost(tmp_path: Path) -> None:
    """The same with any two pages lost, some pairs of all that there are."""
    path = tmp_path / "s"
    ever_saved(path)
    raw = data_file(path).read_bytes()
    pages = [0, 1, *pages_of(path, LEAF)]
    chance = random.Random(5)
    for _ in range(examples(16)):
        data_file(path).write_bytes(raw)
        for page in chance.sample(pages, 2):
            zero(path, page)
        Store.repair(path, max_bytes=CAP)
        check(path)


def test_what_was_never_committed_and_nothing_else_is_left(tmp_path: Path) -> None:
    """Where the pages of nodes and children that are the store's are both lost, those that never were don't take their place."""
    path = tmp_path / "s"
    never = ever_saved(path)
    with Store.open(path) as store:
        there = next(node for node in all_nodes(store.namespace(plain_layout())) if node.node == never.parent)
    raw = data_file(path).read_bytes()
    children = [
        page for page in pages_of(path, LEAF) if child_key(never.parent, ENDS[0][0]) in raw[page * PAGE : (page + 1) * PAGE]
    ]
    assert len(children) > 1  # that of the transaction that never was is among them
    for page in children:
        data_file(path).write_bytes(raw)
        for lost in (page, *pages_with(path, there.encode())):
            zero(path, lost)
        repaired(path)
        assert max(check(path)) <= 32  # the stem, of the snapshot before


@pytest.mark.parametrize("lost", [(0, 1), "nodes"])
def test_what_was_evicted(tmp_path: Path, lost: tuple[int, ...] | str) -> None:
    """A session that was evicted stays evicted, though its bytes are all still there; saved anew it has its new bytes."""
    path = tmp_path / "s"
    gone, again, other = [[n, *range(50)] for n in (1, 2, 3)]
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        for tokens in (gone, again, other):
            save(namespace, tokens)
        namespace.evict(again)
        save(namespace, again, writer=1)
        namespace.evict(gone)
        record = next(node for node in all_nodes(namespace) if node.first == 3).encode()
    if lost == "nodes":
        for page in pages_with(path, record)[:1]:
            zero(path, page)
    else:
        zero(path, 0, 2)
    repaired(path)
    with Store.open(path) as store:
        namespace = store.namespace(plain_layout())
        assert restored_after_all(namespace, again, writers=[1]) in (0, 51)
        assert restored_after_all(namespace, other) in (0, 51)
        assert lost == "nodes" or namespace.match(gone) is None
