"""Handles of an open store: several in a process, closed ones, and what a fork leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import Namespace, Store
from kvstore.errors import ForkedStoreError, StoreClosedError
from kvstore.testing import session_rows
from tests.support import CAP, assert_restores, assert_sound, plain_layout, run_child, save

USES: dict[str, Callable[[Store, Namespace], object]] = {
    "namespace": lambda store, _: store.namespace(plain_layout()),
    "namespaces": lambda store, _: store.namespaces(),
    "stats": lambda store, _: store.stats(),
    "verify": lambda store, _: store.verify(),
    "with": lambda store, _: store.__enter__(),
    "save": lambda _, namespace: save(namespace, [1, 2]),
    "match": lambda _, namespace: namespace.match([1]),
    "lease": lambda _, namespace: namespace.lease([1]),
    "evict": lambda _, namespace: namespace.evict([1]),
    "evict all": lambda _, namespace: namespace.evict(),
}


@pytest.mark.parametrize("use", sorted(USES))
def test_use_after_close_says_so(tmp_path: Path, use: str) -> None:
    """Every call on a closed store, or on a namespace of it, raises StoreClosedError; closing twice does nothing."""
    store = Store.open(tmp_path / "s", max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="closed") as caught:
        USES[use](store, namespace)
    assert isinstance(caught.value, ValueError)
    assert "closed" in repr(store)


def test_two_handles_are_one_file(tmp_path: Path) -> None:
    """The same path opened twice, also by another name, gives two handles; what one saves the other sees, each closes alone."""
    first = Store.open(tmp_path / "s", max_bytes=CAP)
    (tmp_path / "link").symlink_to(tmp_path / "s")
    second = Store.open(tmp_path / "link")
    save(first.namespace(plain_layout()), list(range(30)))
    first.close()
    with pytest.raises(StoreClosedError):
        first.stats()
    namespace = second.namespace(plain_layout())
    assert_restores(namespace, list(range(30)), 30)
    save(namespace, list(range(40)))
    second.close()
    with Store.open(tmp_path / "s") as third:
        assert_restores(third.namespace(plain_layout()), list(range(40)), 40)


def test_a_namespace_of_one_handle_ends_with_the_store(tmp_path: Path) -> None:
    """While another handle keeps the file open, a namespace made by a closed handle is still refused or still right."""
    first, second = Store.open(tmp_path / "s", max_bytes=CAP), Store.open(tmp_path / "s")
    namespace = first.namespace(plain_layout())
    save(namespace, list(range(30)))
    first.close()
    try:
        found = namespace.match(list(range(30)))
        assert found is not None
        assert found.length == 30
    except StoreClosedError:
        pass
    second.close()
    with pytest.raises(StoreClosedError):
        namespace.match([1])


def test_two_stores_in_one_process_are_apart(tmp_path: Path) -> None:
    """Two stores at two paths share nothing."""
    with Store.open(tmp_path / "a", max_bytes=CAP) as a, Store.open(tmp_path / "b", max_bytes=CAP) as b:
        save(a.namespace(plain_layout()), [1, 2, 3])
        assert b.namespace(plain_layout()).match([1, 2, 3]) is None
        assert b.stats().blocks == 0


def test_a_store_moved_and_made_anew_is_another(tmp_path: Path) -> None:
    """A store that was moved away while open does not stand for the new one at its path."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as old:
        save(old.namespace(plain_layout()), [1, 2, 3])
        (tmp_path / "s").rename(tmp_path / "moved")
        with Store.open(tmp_path / "s", max_bytes=CAP) as new:
            assert new.namespace(plain_layout()).match([1, 2, 3]) is None


FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
from kvstore.errors import ForkedStoreError
store = Store.open(path, max_bytes=CAP)
namespace = store.namespace(plain_layout())
save(namespace, list(range(50)))
lease = namespace.lease(list(range(50)))
view = lease.views("v")[0]
pid = os.fork()
if not pid:
    said = []
    for use in (lambda: store.stats(), lambda: namespace.match([1]), lambda: namespace.lease([1]), lambda: save(namespace, [9]),
                lambda: namespace.evict([1])):
        try:
            use()
            said.append("went through")
        except ForkedStoreError:
            said.append("refused")
    try:
        store.stats()
    except ForkedStoreError as error:
        said.append("names the way" if "Store.open" in str(error) else "unclear")
    store.close()
    with Store.open(path + "-other", max_bytes=CAP) as own:  # another store is no matter
        save(own.namespace(plain_layout()), [1, 2])
    os.write(1, (" ".join(said) + "\\n").encode())
    del view, lease
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert (view == session_rows(plain_layout(), list(range(16)))["v"]).all()
del view
lease.close()
assert_restores(namespace, list(range(50)), 50)
save(namespace, list(range(70)))
assert_sound(store)
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """After a fork each use of the parent's handles in the child raises ForkedStoreError, which names the way; the parent loses
    nothing.
    """
    printed = run_child(FORK, tmp_path / "s")
    assert printed.splitlines() == ["refused refused refused refused refused names the way", "parent goes on"]
    assert issubclass(ForkedStoreError, StoreClosedError)
    with Store.open(tmp_path / "s") as store:
        assert_sound(store)


EXITS = """
store = Store.open(path, max_bytes=CAP)
namespace = store.namespace(plain_layout())
save(namespace, list(range(50)))
pid = os.fork()
if not pid:
    sys.exit(0)  # runs the child's atexit handlers and destructors
os.waitpid(pid, 0)
lease = namespace.lease(list(range(50)))
pid = os.fork()
if not pid:
    del lease, namespace
    store.close()
    del store
    sys.exit(0)
os.waitpid(pid, 0)
assert store.stats().readers_pinning
wait = run_child('''
try:
    Store.open(path, lock_timeout=0.2)._scope.environment.exclusive(0.0) and print("exclusive")
except KVStoreError as error:
    print(type(error).__name__)
''', path)
assert not wait, wait
del lease
save(namespace, list(range(60)))
assert_sound(store)
print("whole")
"""


def test_a_forked_child_that_exits_unlocks_nothing(tmp_path: Path) -> None:
    """A child that ends normally neither closes nor unlocks what is the parent's."""
    assert run_child(EXITS, tmp_path / "s") == "whole"


def test_a_view_keeps_the_file_open(tmp_path: Path) -> None:
    """The file is closed with the last view, so that a view made before `close` still reads the right bytes."""
    store = Store.open(tmp_path / "s", max_bytes=CAP)
    namespace = store.namespace(plain_layout())
    save(namespace, list(range(16)))
    with namespace.lease(list(range(16))) as lease:
        view = lease.views("v")[0]
    store.close()
    again = Store.open(tmp_path / "s")
    assert np.array_equal(view, session_rows(plain_layout(), list(range(16)))["v"])
    del view
    again.close()
