"""Namespaces share nothing: not an index entry, not a block, not a hash domain."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvstore import Layout, Store
from kvstore.testing import session_rows
from tests.layout.test_layout import VARIANTS
from tests.support import CAP, assert_restores, assert_sound, plain_layout, run_child, save

TOKENS = list(range(50))


def test_layouts_that_differ_in_one_thing_share_nothing(path: Path) -> None:
    """The same tokens under layouts that differ in one thing each are misses for each other, and each has its own first rows."""
    with Store.open(path, max_bytes=64 << 20) as store:
        namespaces = {name: store.namespace(layout) for name, layout in VARIANTS.items() if not layout.states}
        assert len({namespace.namespace_id for namespace in namespaces.values()}) == len(namespaces)
        for writer, namespace in enumerate(namespaces.values()):
            assert namespace.match(TOKENS) is None
            result = save(namespace, TOKENS, writer=writer)
            assert result.stored_tokens == 0
        for writer, namespace in enumerate(namespaces.values()):
            assert_restores(namespace, TOKENS, 50, writer=writer)
        assert store.stats().namespaces == len(namespaces)
        assert_sound(store)
        for name, namespace in namespaces.items():
            namespace.evict()
            assert namespace.match(TOKENS) is None, name
        assert store.stats().blocks == 0


@pytest.mark.parametrize(
    ("one", "other"),
    list(itertools.combinations([b"", b"a", b"b", b"a\0", b"ab", b"a" * 1000], 2)),
    ids=lambda salt: repr(salt)[:8],
)
def test_salts_share_nothing(store: Store, one: bytes, other: bytes) -> None:
    """The same tokens and bytes under another salt are a miss, and are stored as blocks of their own."""
    a, b = store.namespace(plain_layout(), salt=one), store.namespace(plain_layout(), salt=other)
    save(a, TOKENS)
    assert b.match(TOKENS) is None
    with b.lease(TOKENS) as lease:
        assert not lease
    save(b, TOKENS)
    ids = [{block.block_id for block in namespace.lease(TOKENS).blocks} for namespace in (a, b)]
    assert not ids[0] & ids[1]
    a.evict()
    assert_restores(b, TOKENS, 50)


def test_a_salt_is_not_stored(store: Store) -> None:
    """A salt may be a secret: only its digest is in the file."""
    save(store.namespace(plain_layout(), salt=b"correct horse battery staple"), TOKENS)
    assert b"battery staple" not in (Path(store.path) / "data.mdb").read_bytes()


@pytest.mark.parametrize("salt", ["text", 5, None])
def test_a_salt_is_bytes(store: Store, salt: object) -> None:
    """A salt that is no bytes is a TypeError that says to encode it."""
    with pytest.raises(TypeError, match="encode"):
        store.namespace(plain_layout(), salt=salt)  # type: ignore[arg-type]
    assert store.stats().namespaces == 0


def test_the_same_layout_and_salt_are_the_same_namespace(store: Store, path: Path) -> None:
    """Another handle, another object of an equal layout, another process: the same namespace."""
    first = store.namespace(plain_layout(), salt=b"x")
    save(first, TOKENS)
    again = store.namespace(Layout.decode(plain_layout().canonical), salt=bytearray(b"x"))  # type: ignore[arg-type]
    assert again.namespace_id == first.namespace_id
    assert_restores(again, TOKENS, 50)
    code = "with Store.open(path) as s: print(s.namespace(plain_layout(), salt=b'x').match(list(range(50))).length)"
    assert run_child(code, path) == "50"


def test_namespaces_are_described(store: Store) -> None:
    """The store tells what each namespace holds."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    save(namespace, [*TOKENS[:20], 99])
    [info] = store.namespaces()
    assert (info.namespace_id, info.model, info.block_tokens) == (namespace.namespace_id.hex(), "plain", 16)
    assert (info.sessions, info.nodes, info.tokens, info.checkpoints) == (2, 3, 51, 0)
    assert info.last_use > 1_700_000_000_000_000
    stats = store.stats()
    assert (stats.nodes, stats.namespaces, stats.max_bytes) == (3, 1, CAP)
    assert stats.payload_bytes < stats.live_bytes <= stats.limit_bytes < CAP
    assert stats.live_bytes <= stats.file_bytes + 32768
    assert stats.counters.saves == 2
    assert stats.counters.saved_tokens == 51


def test_evicting_a_namespace_leaves_the_others(store: Store) -> None:
    """Evicting all of one namespace takes its every block and nothing of another's."""
    a, b = store.namespace(plain_layout(), salt=b"a"), store.namespace(plain_layout(), salt=b"b")
    for n in range(80):
        save(a, [n, *range(20)])
    save(b, TOKENS)
    result = a.evict()
    assert result.nodes == 80
    assert result.tokens == 80 * 21
    assert result.freed_bytes >= 80 * 2 * 32768
    assert a.evict().nodes == 0
    assert_restores(b, TOKENS, 50)
    assert store.stats().nodes == 1
    assert session_rows(plain_layout(), TOKENS)["v"].shape == (50, 5)
