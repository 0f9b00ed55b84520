"""The cap: needed once, kept in the store, never another one by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import Layout, Store, Stream
from kvstore.env import MIN_CAP
from kvstore.errors import CapError
from tests.support import CAP, save


@pytest.mark.parametrize("cap", [0, 1, -5, MIN_CAP - 1])
def test_a_cap_too_small_for_lmdb_is_refused(tmp_path: Path, cap: int) -> None:
    """A cap below what the trees need is refused with the least that will do, before anything is made."""
    with pytest.raises(CapError, match=str(MIN_CAP)) as caught:
        Store.open(tmp_path / "s", max_bytes=cap)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("cap", [1.5, "1G", True, 1e9])
def test_a_cap_that_is_no_integer_is_refused(tmp_path: Path, cap: Any) -> None:
    """Bytes are an integer."""
    with pytest.raises(CapError, match="integer"):
        Store.open(tmp_path / "s", max_bytes=cap)
    assert not (tmp_path / "s").exists()


def test_the_least_cap_works(tmp_path: Path) -> None:
    """A store of exactly the least cap stores and restores a session of small blocks."""
    layout = Layout((Stream("k", "u8", (64,)),), block_tokens=16)
    with Store.open(tmp_path / "s", max_bytes=MIN_CAP) as store:
        namespace = store.namespace(layout)
        save(namespace, list(range(40)))
        found = namespace.match(list(range(50)))
        assert found is not None
        assert found.length == 40


def test_a_cap_too_small_for_the_layout_is_refused(tmp_path: Path) -> None:
    """A layout whose blocks the store has no room to work with is refused with the cap that it needs, and that one works."""
    layout = Layout((Stream("k", "u8", (64 << 10,)),), block_tokens=64)
    with Store.open(tmp_path / "s", max_bytes=CAP // 2) as store:
        with pytest.raises(CapError, match="at least") as caught:
            store.namespace(layout)
        assert store.stats().namespaces == 0
    needed = int(str(caught.value).split("at least ")[1].split(",")[0])
    with Store.open(tmp_path / "t", max_bytes=needed) as store:
        save(store.namespace(layout), list(range(70)))


def test_another_cap_is_refused_and_names_the_call(tmp_path: Path) -> None:
    """Opening with another cap raises both numbers and the call that changes it, in this process and after a reopening."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        assert store.max_bytes == CAP
        with pytest.raises(CapError, match=rf"{CAP}.*{2 * CAP}.*Store\.resize"):
            Store.open(tmp_path / "s", max_bytes=2 * CAP)
    with pytest.raises(CapError, match=rf"{CAP}.*{2 * CAP}.*Store\.resize"):
        Store.open(tmp_path / "s", max_bytes=2 * CAP)
    for cap in (None, CAP):
        with Store.open(tmp_path / "s", max_bytes=cap) as store:
            assert store.max_bytes == CAP
