"""Power loss and failing disks: what a save has returned for is on the disk, whatever else was on its way there."""

from __future__ import annotations

import os
import random
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import Store
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    data_file,
    examples,
    hybrid_layout,
    restored,
    run_child,
    save,
    wide_layout,
)

from .witness import PRELOADED, Note, build, images, read

LENGTH = 700  # tokens of 4 KiB: eleven pieces in a store of this size
Watched = Callable[[str], list[Note]]


def session(number: int) -> list[int]:
    """Tokens of a session; each shares a beginning with the one before it."""
    return [*range(100 * (number % 2), 100), *range(1000 * number, 1000 * number + LENGTH)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make an empty store."""
    with Store.open(tmp_path / "s", max_bytes=CAP):
        pass
    return tmp_path / "s"


@pytest.fixture
def watched(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Run a child on the store and return what it wrote and waited for."""
    library = build(tmp_path)

    def run(code: str) -> list[Note]:
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(library))
            patch.setenv("WITNESS_NOTES", str(tmp_path / "notes"))
            run_child(PRELOADED + textwrap.dedent(code), path)
        return read(tmp_path / "notes")

    return run


def between(notes: list[Note], first: int, last: int) -> str:
    """The kinds of what happened between two marks; the write of a meta page, by which a commit counts, is an M."""
    marks = {note.offset: place for place, note in enumerate(notes) if note.kind == "m"}
    return "".join("M" if is_meta(note) else note.kind for note in notes[marks[first] + 1 : marks[last]])


def is_meta(note: Note) -> bool:
    """Whether a meta page was written: a part of one of the first two pages."""
    return note.kind == "w" and note.offset < 65536 and len(note.data) < 200


@pytest.mark.parametrize("seed", range(examples(2)))
def test_any_power_loss_leaves_what_was_acknowledged(path: Path, tmp_path: Path, watched: Watched, seed: int) -> None:
    """Sessions in many pieces, with evictions: at any moment the file is sound, holds the last session that a save returned for,
    and of the one under way a prefix or nothing, byte for byte.
    """
    before = data_file(path).read_bytes()
    notes = watched("""
    from tests.env.test_power_loss import session
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        for number in range(1, 7):
            save(namespace, session(number))
            mark(number)
        assert store._scope.counters.evicted_nodes
    """)
    assert "".join(note.kind for note in notes).count("s") > 30
    under_way = 0
    for place, (marked, image) in enumerate(images(before, notes, random.Random(seed), 0.12)):
        lost = tmp_path / f"lost{place}"
        lost.mkdir(mode=0o700)
        data_file(lost).write_bytes(image)
        with Store.open(lost) as store:
            namespace = store.namespace(wide_layout())
            if marked:
                assert_restores(namespace, session(marked), len(session(marked)))
            under_way += 0 < restored(namespace, session(marked + 1)) < len(session(marked + 1))
            assert_sound(store)
            save(namespace, session(9))  # it is a store to go on with
            assert_restores(namespace, session(9), len(session(9)))
        shutil.rmtree(lost)
    assert under_way > 3


def test_a_long_save_waits_once_a_piece(watched: Watched) -> None:
    """Each piece waits for its pages before its meta page is written; the last one waits for that as well, states or not."""
    notes = watched("""
    with Store.open(path) as store:
        wide, hybrid = store.namespace(wide_layout()), store.namespace(hybrid_layout())
        save(hybrid, [1])
        mark(1)
        save(wide, list(range(700)))
        mark(2)
        save(hybrid, list(range(40)))
        mark(3)
    """)
    long, short = between(notes, 1, 2), between(notes, 2, 3)
    for kinds in (long, short):
        assert kinds.endswith("sMs"), kinds
        assert "W" not in kinds
    assert long.count("s") == long.count("sM") + 1 >= 6
    assert short.count("s") == 2


def test_a_long_cascade_waits_as_a_save_does(path: Path, watched: Watched) -> None:
    """A cascade in pieces waits once for each of them, and once more in the end."""
    notes = watched("""
    with Store.open(path) as store:
        engine = HashEngine(wide_layout())
        engine.feed(list(range(700)))
        with SessionTier(store, engine) as tier:
            mark(1)
            tier.cascade(list(range(700)))
            tier.flush()
            mark(2)
    """)
    kinds = between(notes, 1, 2)
    assert kinds.endswith("sMs"), kinds
    assert kinds.count("s") == kinds.count("sM") + 1 >= 6


def test_stored_by_somebody_a_moment_ago(path: Path, watched: Watched) -> None:
    """A save that finds all of it stored returns once that is durable, and costs nothing where that is known."""
    notes = watched("""
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(300)))
        with store._scope.environment.write(5.0, durable=False) as txn:
            txn.put(txn.db.meta, b"step", b"of something longer")
        mark(1)
        save(namespace, list(range(300)))
        mark(2)
        save(namespace, list(range(300)))
        mark(3)
    with Store.open(path) as store:
        mark(4)
        save(store.namespace(wide_layout()), list(range(300)))
        mark(5)
    """)
    assert between(notes, 1, 2) == "s"
    assert between(notes, 2, 3) == ""
    assert between(notes, 4, 5) == "s"  # a process that has just come can't know


@pytest.mark.parametrize("wait", [1, 2, 3, 4])
def test_a_save_that_fails_half_way(path: Path, watched: Watched, wait: int) -> None:
    """A disk that fails in the middle of a long save: it raises, and what it had published by then is a durable, valid prefix."""
    notes = watched(f"""
    from kvstore import KVStoreError
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(5000, 5100)))
        fail({wait})
        try:
            save(namespace, list(range(700)))
        except KVStoreError:
            mark(1)
    """)
    kinds = "".join(note.kind for note in notes)
    failed, mark = kinds.index("f"), kinds.index("m")
    # no block is written after it: only the note that the save was under way is taken back
    assert sum(len(note.data) for note in notes[failed:mark] if note.kind == "w") < 64 * 4096
    if wait > 1:
        assert kinds[:mark].endswith("s")
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        assert_restores(namespace, list(range(5000, 5100)), 100)
        assert restored(namespace, list(range(700))) == 64 * (wait - 1)
        save(namespace, list(range(700)))
        assert_restores(namespace, list(range(700)), 700)
        assert_sound(store)


def test_a_disk_that_does_not_keep_the_last_page(path: Path, watched: Watched) -> None:
    """Where the wait for the meta page fails, the save is not acknowledged, and nothing more is written by this process."""
    watched("""
    from kvstore.errors import StoreDamagedError
    with Store.open(path) as store:
        namespace = store.namespace(hybrid_layout())
        save(namespace, list(range(20)))
        fail(2)
        for _ in range(2):
            try:
                save(namespace, list(range(40)))
            except StoreDamagedError as error:
                assert "disk" in str(error)
            else:
                raise AssertionError("it was acknowledged")
        assert restored(namespace, list(range(20))) == 20
    with Store.open(path) as store:
        save(store.namespace(hybrid_layout()), list(range(60)))
    """)
    with Store.open(path) as store:
        assert_restores(store.namespace(hybrid_layout()), list(range(60)), 60)
        assert_sound(store)
    assert os.listdir(path)


def test_two_that_wait_for_one_failure(path: Path, watched: Watched) -> None:
    """Of two waits that overlap the kernel tells one that the disk failed: neither save is acknowledged, and none that follows."""
    watched("""
    import threading
    from kvstore.errors import StoreDamagedError
    with Store.open(path) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(50)))
        ends = []
        def attempt(first):
            try:
                save(namespace, list(range(first, first + 40)))
            except StoreDamagedError as error:
                ends.append(str(error))
            else:
                ends.append("acknowledged")
        _witness.witness_tell_one()
        threads = [threading.Thread(target=attempt, args=(1000,)) for _ in range(2)]
        threads[0].start()
        while not _witness.witness_asked():
            assert threads[0].is_alive()
            time.sleep(0.001)
        threads[1].start()  # finds it all stored
        for thread in threads:
            thread.join()
        attempt(1000)
        attempt(2000)
        assert len(ends) == 4 and all("disk" in end for end in ends), ends
    """)
    with Store.open(path) as store:
        assert_restores(store.namespace(wide_layout()), list(range(50)), 50)
        assert_sound(store)


def test_closing_in_the_middle_of_a_save(path: Path, watched: Watched) -> None:
    """A save that another thread closes the last handle under goes on to its end, and is durable when it returns."""
    notes = watched("""
    import threading
    store = Store.open(path)
    namespace, environment = store.namespace(wide_layout()), store._scope.environment
    results = []
    saving = threading.Thread(target=lambda: results.append(save(namespace, list(range(700)))))
    def waits():
        frame = sys._current_frames().get(saving.ident)
        while frame is not None and frame.f_code.co_name != "_write":
            frame = frame.f_back
        return frame is not None
    with environment.write(30.0):
        saving.start()
        while not waits():  # for the lock, to publish its first piece
            assert saving.is_alive()
            time.sleep(0.001)
        store.close()
    mark(1)
    saving.join()
    mark(2)
    assert results and results[0].new_tokens == 700
    assert environment.gone.wait(30)
    """)
    kinds = between(notes, 1, 2)
    assert kinds.endswith("sMs"), kinds
    with Store.open(path) as store:
        assert_restores(store.namespace(wide_layout()), list(range(700)), 700)
        assert_sound(store)


def test_a_new_store_has_a_name(tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory that is made for a store is made durable in the one above it, before the store's own entries are."""
    monkeypatch.setenv("WITNESS_DIRECTORIES", "1")
    notes = watched("""
    from pathlib import Path
    Store.open(Path(path).parent / "a" / "b" / "new", max_bytes=CAP).close()
    """)
    a = tmp_path / "a"
    assert [note.data.decode() for note in notes if note.kind == "d"] == [str(p) for p in (tmp_path, a, a / "b", a / "b" / "new")]
