"""How a long save is cut into transactions."""

from __future__ import annotations

from pathlib import Path

from kvstore import Store
from tests.support import assert_restores, assert_sound, save, wide_layout


def test_the_first_save_of_a_namespace(tmp_path: Path) -> None:
    """A namespace that no save has made known yet is cut like any other: two blocks of 4 MiB a transaction."""
    used = []
    with Store.open(tmp_path / "s", max_bytes=320 << 20) as store:
        namespace = store.namespace(wide_layout(16384, 256))
        for first in (0, 10_000):
            tokens = list(range(first, first + 6 * 256))
            with store._scope.environment.reading() as txn:
                before = txn.transaction
            save(namespace, tokens)
            with store._scope.environment.reading() as txn:
                used.append(txn.transaction - before)
            assert_restores(namespace, tokens, len(tokens))
        assert_sound(store)
    assert used == [3, 3]
