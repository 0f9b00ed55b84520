"""Values that are written while their transaction goes on: once, whatever becomes of the transaction."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.env import Environment
from kvstore.env.early import EarlyValues
from kvstore.records.constants import PAGE_HEADER
from tests.support import CAP, assert_restores, assert_sound, data_file, restored, run_child, save, wide_layout

from .witness import PRELOADED, build, read

LONG = (320 << 10) - PAGE_HEADER  # bytes of a value that is written early: it fills its pages
SHORT = 300 << 10  # of one that is left to LMDB


def value(seed: int, length: int = LONG) -> memoryview:
    """Bytes of a value."""
    return memoryview(np.random.default_rng(seed).bytes(length))


def in_file(environment: Environment, offset: int, length: int = LONG) -> bytes:
    """What the file has there."""
    return environment.pread(length, offset)


def test_each_byte_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save writes its blocks and its index, and nothing of it twice: LMDB leaves out what is written already."""
    library = build(tmp_path)
    with Store.open(tmp_path / "s", max_bytes=CAP):
        pass
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("WITNESS_NOTES", str(tmp_path / "notes"))
        code = """
        with Store.open(path) as store:
            namespace = store.namespace(wide_layout())
            save(namespace, [1])
            for number in range(1, 6):
                mark(number)
                result = save(namespace, list(range(number * 1000, number * 1000 + 64)))
                assert result.new_blocks == 1
            mark(6)
        """
        run_child(PRELOADED + textwrap.dedent(code), tmp_path / "s")
    notes = read(tmp_path / "notes")
    places = [place for place, note in enumerate(notes) if note.kind == "m"]
    for start, stop in itertools.pairwise(places):
        writes = [note for note in notes[start:stop] if note.kind == "w"]
        total = sum(len(note.data) for note in writes)
        assert 64 * 4096 < total < 64 * 4096 + 16 * 32768, total  # the block, its header's page, pages of the index
        writes.sort(key=lambda note: note.offset)
        assert all(one.offset + len(one.data) <= other.offset for one, other in itertools.pairwise(writes))


def test_on_its_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value is written while its transaction goes on, at the place that was told; a small one with the commit."""
    library = build(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WITNESS_NOTES", str(tmp_path / "notes"))
    code = f"""
    from pathlib import Path
    from tests.env.test_early import value
    notes = Path(os.environ["WITNESS_NOTES"])
    with Store.open(path, max_bytes=CAP) as store, store._scope.environment.write(5.0) as txn:
        mark(1)
        before = notes.stat().st_size
        small = txn.put_block(b"s" * 32, value(1, {SHORT}))
        large = txn.put_block(b"l" * 32, value(2, {LONG}))
        wait_until(lambda: notes.stat().st_size > before + {LONG})
        mark(large)
        mark(small)
    """
    run_child(PRELOADED + textwrap.dedent(code), tmp_path / "s")
    notes = read(tmp_path / "notes")
    first, second, third = (place for place, note in enumerate(notes) if note.kind == "m")
    (early,) = notes[first + 1 : second]
    assert (early.kind, early.offset) == ("w", notes[second].offset - PAGE_HEADER)
    assert early.data[PAGE_HEADER:] == value(2)
    assert any(note.kind == "w" and bytes(value(1, SHORT)) in note.data for note in notes[third:])
    assert not any(note.kind == "w" and bytes(value(2))[:4096] in note.data for note in notes[third:])


def test_a_value_that_goes_again(tmp_path: Path) -> None:
    """Values put and deleted in one transaction, whose pages others take: what is there in the end is what was put last."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        environment = store._scope.environment
        save(store.namespace(wide_layout()), list(range(200)))
        for turn in range(4):
            places = {}
            with environment.write(5.0) as txn:
                for number in range(6):
                    key = bytes([turn, number]) * 16
                    places[number] = txn.put_block(key, value(number))
                    if number % 2:
                        assert txn.delete(txn.db.blocks, key)
                        places[number] = txn.put_block(key, value(100 + number, LONG if number % 4 == 1 else SHORT))
                    if number == 4:
                        assert txn.delete(txn.db.blocks, key)
                        del places[number]
            with environment.reading() as reader:
                for number, offset in places.items():
                    length = SHORT if number % 4 == 3 else LONG
                    expected = bytes(value(100 + number if number % 2 else number, length))
                    assert in_file(environment, offset, length) == expected, (turn, number)
                    assert reader.get(bytes([turn, number]) * 16, reader.db.blocks) == expected
                assert reader.get(bytes([turn, 4]) * 16, reader.db.blocks) is None
            with environment.write(5.0) as txn:
                for number in places:
                    assert txn.delete(txn.db.blocks, bytes([turn, number]) * 16)
        assert_restores(store.namespace(wide_layout()), list(range(200)), 200)
        assert_sound(store)


def test_a_transaction_that_is_undone(tmp_path: Path) -> None:
    """What an aborted transaction has written lies in free pages: nobody sees it, and the next ones write over it."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace, environment = store.namespace(wide_layout()), store._scope.environment
        save(namespace, list(range(200)))
        sizes = []
        for turn in range(3):
            with pytest.raises(KeyError), environment.write(5.0) as txn:
                for number in range(5):
                    txn.put_block(bytes([turn, number]) * 16, value(number))
                raise KeyError(turn)
            with environment.reading() as reader:
                assert all(reader.get(bytes([turn, number]) * 16, reader.db.blocks) is None for number in range(5))
            save(namespace, [9, turn, *range(200)])
            assert_restores(namespace, [9, turn, *range(200)], 202)
            sizes.append(data_file(tmp_path / "s").stat().st_size)
        assert sizes[-1] - sizes[0] < 3 << 20, sizes  # two sessions of four blocks, and not ten values as well
        assert_restores(namespace, list(range(200)), 200)
        assert_sound(store)


def test_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values can't be written early LMDB writes them: the same bytes are restored."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        save(store.namespace(wide_layout()), list(range(300)))
    monkeypatch.setattr(EarlyValues, "possible", staticmethod(lambda fd: False))
    with Store.open(tmp_path / "s") as store:
        namespace = store.namespace(wide_layout())
        assert_restores(namespace, list(range(300)), 300)
        save(namespace, [7, *range(300)])
        assert restored(namespace, [7, *range(300)]) == 301
        assert_sound(store)


def test_the_engine_is_the_one_that_is_known(tmp_path: Path) -> None:
    """With the LMDB that is installed values are written early: the flag that it depends on is one of its own."""
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        assert EarlyValues.possible(store._scope.environment._writer_fd)
    assert not EarlyValues.possible(-1)
