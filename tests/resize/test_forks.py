"""A fork in the middle of a resize or a repair: the parent goes on, and the child leaves everything alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Store
from tests.support import CAP, assert_restores, assert_sound, plain_layout, run_child, save

TOKENS = list(range(300))

# the callback forks once at each step; a child goes on as if nothing had happened
FORKS = """
import traceback
children, steps, main = [], set(), os.getpid()

def progress(what, done, total):
    if os.getpid() != main or what in steps:
        return
    steps.add(what)
    pid = os.fork()
    if pid:
        children.append((what, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

try:
    WORK
    if os.getpid() != main:
        print("the child came through", sorted(steps))
except errors.ForkedStoreError:
    if os.getpid() == main:
        raise
except BaseException:
    traceback.print_exc()
    os._exit(1)
if os.getpid() != main:
    sys.stdout.flush()
    os._exit(7)
print(*sorted({status for _, status in children}), len(children))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a store of two sessions."""
    with Store.open(tmp_path / "s", max_bytes=2 * CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        save(store.namespace(plain_layout()), TOKENS[::-1])
    return tmp_path / "s"


def look(path: Path) -> None:
    """All of it is there, and nothing beside it but a damaged file that was moved aside."""
    with Store.open(path) as store:
        for tokens in (TOKENS, TOKENS[::-1]):
            assert_restores(store.namespace(plain_layout()), tokens, 300)
        assert_sound(store)
    assert [entry.name for entry in path.parent.iterdir() if entry != path and ".damaged-" not in entry.name] == []


def test_a_resize(path: Path) -> None:
    """Neither the copy under way nor the store is touched by a child that was forked at any step of a resize."""
    said = run_child(FORKS.replace("WORK", "Store.open(path).resize(CAP, progress=progress)"), path)
    status, count = said.split()
    assert status == "7"
    assert int(count) >= 3
    look(path)


def test_a_repair(path: Path) -> None:
    """Neither is the store that a repair writes anew."""
    with (path / "data.mdb").open("r+b") as file:
        file.seek(32768)
        file.write(bytes(32768))
    said = run_child(FORKS.replace("WORK", "Store.repair(path, progress=progress)"), path)
    status, count = said.split()
    assert status == "7"
    assert int(count) > 3
    look(path)
    assert len(list(path.parent.glob("s.damaged-*"))) == 1
