"""A handle that resizes its store goes on with the new file; what was made from it before says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import SessionTier, Store
from kvstore.errors import CapError, ForkedStoreError, StoreBusyError, StoreClosedError
from kvstore.testing import HashEngine, destination
from tests.support import CAP, assert_restores, assert_sound, child_at, plain_layout, run_child, save
from tests.tier.engines import PLAIN, uninterrupted

TOKENS = list(range(40))


@pytest.mark.parametrize("cap", [CAP // 2, 2 * CAP, CAP])
def test_the_handle_goes_on(tmp_path: Path, cap: int) -> None:
    """After a resize, up, down or to the same cap, the handle restores and saves; namespaces and leases from before are closed."""
    said = []
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        old = store.namespace(plain_layout())
        save(old, TOKENS)
        lease = old.lease(TOKENS)
        lease.close()
        stats = store.resize(cap, progress=lambda what, done, total: said.append((what, done <= total)))
        assert stats.max_bytes == store.max_bytes == cap
        assert all(whole for _, whole in said)
        assert bool(said) == (cap < CAP)
        for use in (lambda: old.match(TOKENS), lambda: save(old, [1]), lambda: old.lease(TOKENS), lambda: old.evict()):
            with pytest.raises(StoreClosedError, match=r"was resized.*anew from the store") as caught:
                use()
            assert not isinstance(caught.value, ForkedStoreError)
        with pytest.raises(ValueError, match=r"closed|ended"):
            lease.copy_into(destination(plain_layout(), 40))
        namespace = store.namespace(plain_layout())
        assert_restores(namespace, TOKENS, 40)
        save(namespace, [*TOKENS, 1])
        assert_sound(store)
    with Store.open(tmp_path / "s", max_bytes=cap) as store:
        assert_restores(store.namespace(plain_layout()), [*TOKENS, 1], 41)
        assert_sound(store)


def test_what_keeps_it_from_resizing(tmp_path: Path) -> None:
    """Another handle, a lease, a view: each refuses a resize by name, and all goes on as it was; without them it goes through."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(plain_layout())
        save(namespace, TOKENS)
        other = Store.open(tmp_path / "s")
        with pytest.raises(StoreBusyError, match="more than this handle"):
            store.resize(2 * CAP)
        other.close()
        with namespace.lease(TOKENS) as lease:
            view = lease.views("v")[0]
            with pytest.raises(StoreBusyError, match="more than this handle"):
                store.resize(2 * CAP)
        with pytest.raises(StoreBusyError, match="more than this handle"):
            store.resize(2 * CAP)
        assert_restores(namespace, TOKENS, 40)
        assert int(view[1].sum()) >= 0
        del view
        assert store.resize(2 * CAP).max_bytes == 2 * CAP


def test_another_process(tmp_path: Path) -> None:
    """A process that has the store open refuses the resize; the handle goes on with the old cap and a namespace made anew."""
    with Store.open(tmp_path / "s", max_bytes=CAP, lock_timeout=0.3) as store:
        save(store.namespace(plain_layout()), TOKENS)
        with child_at("store = Store.open(path)\nprint('open', flush=True)\nsys.stdin.read()", tmp_path / "s"):
            with pytest.raises(StoreBusyError, match="another process"):
                store.resize(CAP // 2)
            assert store.max_bytes == CAP
            save(store.namespace(plain_layout()), [*TOKENS, 1])
        assert store.resize(CAP // 2).max_bytes == CAP // 2
        assert_restores(store.namespace(plain_layout()), [*TOKENS, 1], 41)


@pytest.mark.parametrize("cap", [1000, 1 << 60, -1, 1.5, "1G"])
def test_a_cap_that_cannot_be(tmp_path: Path, cap: int) -> None:
    """A cap that is refused leaves the handle open, with the old one."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        with pytest.raises(CapError):
            store.resize(cap)
        assert store.max_bytes == CAP
        assert_restores(store.namespace(plain_layout()), TOKENS, 40)


def test_a_closed_and_a_forked_handle(tmp_path: Path) -> None:
    """Neither a closed handle nor the copy of one in a forked child resizes."""
    store = Store.open(tmp_path / "s", max_bytes=CAP)
    store.close()
    with pytest.raises(StoreClosedError, match="closed"):
        store.resize(2 * CAP)
    code = """
    store = Store.open(path)
    pid = os.fork()
    if not pid:
        try:
            store.resize(2 * CAP)
        except errors.ForkedStoreError:
            os._exit(5)
        os._exit(6)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), store.max_bytes)
    """
    assert run_child(code, tmp_path / "s") == f"5 {CAP}"


def test_a_tier_from_before(tmp_path: Path) -> None:
    """A tier that was made before a resize says so; one that is made anew promotes what was saved."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        with SessionTier(store, uninterrupted(PLAIN, TOKENS)) as tier:
            tier.cascade(TOKENS)
            tier.flush()
            store.resize(2 * CAP)
            with pytest.raises(StoreClosedError, match="was resized"):
                tier.promote(TOKENS)
        with SessionTier(store, HashEngine(PLAIN)) as tier:
            assert tier.promote(TOKENS) == 39


def test_closed_in_the_middle_of_it(tmp_path: Path) -> None:
    """A handle that is closed by what is told of the progress is closed afterwards, with the file; the new cap holds."""
    code = """
    store = Store.open(path, max_bytes=CAP)
    try:
        store.resize(CAP // 2, progress=lambda what, done, total: store.close())
    except errors.StoreClosedError:
        print("closed")
    with Store.open(path) as store:
        print(store.max_bytes)
    with Store.open(path) as store:
        print(store._scope.environment.exclusive(0.0))
    """
    assert run_child(code, tmp_path / "s").split() == ["closed", str(CAP // 2), "True"]
