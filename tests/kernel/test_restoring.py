"""Restoring from files: the same as a scatter, wherever the bytes are; what can't be read is an error of its block."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.kernel import FileMap, FileSource, Restored, Rows, gather, progress_wait, read_error, restore
from tests.support import examples

from .oracle import Payloads, Stream
from .test_copying import jobs

READS = ["cached", "through", "past", "refused"]


class Stored:
    """Payloads in a file, 4 KiB apart or more, and the file opened in every way."""

    def __init__(self, path: Path, payloads: Payloads, shift: int = 0) -> None:
        self.path = path
        self.offsets = np.zeros(len(payloads.views), np.uint64)
        with path.open("wb") as file:
            for index, view in enumerate(payloads.views):
                file.seek(4096 + file.tell() // 4096 * 4096 + shift)
                self.offsets[index] = file.tell()
                file.write(view.tobytes())
            file.write(bytes(4096))
            self.length = file.tell()
            file.flush()
            os.fsync(file.fileno())
        self.fd = os.open(path, os.O_RDWR)
        try:
            self.direct: int | None = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self.direct = None
        self.map = FileMap(self.fd, self.length)

    def source(self, *, direct: bool = True) -> FileSource:
        """Give the file as the kernel takes it."""
        return FileSource(self.map, self.fd, self.direct if direct else None)

    def drop(self) -> None:
        """Let the page cache forget it, as far as it will."""
        self.map.discard(0, self.length)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close everything."""
        self.map.close()
        os.close(self.fd)
        if self.direct is not None:
            os.close(self.direct)


@contextmanager
def stored(path: Path, payloads: Payloads, shift: int = 0) -> Iterator[Stored]:
    """Write payloads to a file for the length of a `with` block."""
    file = Stored(path / "file", payloads, shift)
    try:
        yield file
    finally:
        file.close()


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Give zeros of an array's shape and dtype from the start of a page on."""
    raw = np.zeros(array.nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


@settings(max_examples=examples(120))
@given(jobs(), st.sampled_from(READS), st.sampled_from([0, 0, 64, 4032]), st.sampled_from([1, 3]))
def test_as_a_scatter(tmp_path_factory: Any, job: Any, reads: str, shift: int, threads: int) -> None:
    """Every used row, and no other, is in place, from the page cache and from the disk, through the cache and past it."""
    streams, first, tokens, used = job
    rows = [s.rows() for s in streams]
    payloads = Payloads(rows, tokens)
    sums = gather(rows, payloads.addresses, first, tokens)
    before = [s.array.copy() for s in streams]
    with stored(tmp_path_factory.mktemp("restore"), payloads, shift) as file:
        for s in streams:
            s.array.view(np.dtype(("V", s.array.itemsize)))[...] = np.zeros((), ("V", s.array.itemsize))
        if reads != "cached":
            file.drop()
        progress = np.zeros(len(rows), np.int32)
        restored = restore(
            file.source(direct=reads != "refused"),
            rows,
            file.offsets,
            first,
            tokens,
            used,
            sums,
            direct=np.full(first.size, reads in ("past", "refused"), np.uint8),
            progress=progress,
            threads=threads,
        )
        assert restored is not None
        assert restored.sound
        assert (progress == 1).all()
        if reads == "refused":
            assert (restored.read < 2).all()
    for s, old in zip(streams, before, strict=True):
        expected = np.zeros_like(old)
        for i in range(first.size):
            index = s.index(int(first[i]), int(used[i]))
            expected[index] = old[index]
        assert s.array.tobytes() == expected.tobytes()


def large_job(blocks: int, seed: int = 0) -> tuple[list[Stream], list[Rows], Payloads, NDArray[np.int64], NDArray[np.int64], Any]:
    """Make streams of many shapes of which a block takes some MiB: long rows, heads in front, a row of more than a read."""
    tokens = 512
    random = np.random.default_rng(seed)
    streams = [
        Stream(random.integers(0, 256, (blocks * tokens, 1024), np.uint8), 0),
        Stream(random.integers(0, 256, (blocks * tokens, 2048), np.uint8), 0),
        Stream(random.integers(0, 256, (3, blocks * tokens, 5, 10), np.uint8)[:, :, ::-1], 1),
        Stream(random.integers(0, 256, (blocks * tokens // 256, 1_500_000), np.uint8), 0, 256),
        Stream(random.integers(0, 256, (8, blocks * tokens // 4, 256), np.uint8), 1, 4),
    ]
    rows = [s.rows() for s in streams]
    first, count = np.arange(blocks) * tokens, np.full(blocks, tokens)
    payloads = Payloads(rows, count)
    return streams, rows, payloads, first, count, gather(rows, payloads.addresses, first, count)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("wanted", [(0, 1, 2, 3, 4), (0, 1), (1, 3), (4,)])
def test_large(tmp_path: Path, reads: str, blocks: int, wanted: tuple[int, ...]) -> None:
    """What is read in several pieces, put in place by the read itself, or left out, is exact as well."""
    streams, rows, payloads, first, count, sums = large_job(blocks)
    copies = [Stream(aligned(s.array), s.axis, s.tokens_per_row) for s in streams]
    into = [c.rows() if i in wanted else Rows.skip(row_bytes=r.row_bytes, tokens_per_row=r.tokens_per_row) for i, (c, r) in
            enumerate(zip(copies, rows, strict=True))]  # fmt: skip
    used = count.copy()
    used[-1] = 256
    with stored(tmp_path, payloads) as file:
        if reads != "cached":
            file.drop()
        restored = restore(
            file.source(direct=reads != "refused"),
            into,
            file.offsets,
            first,
            count,
            used,
            sums,
            direct=np.full(blocks, reads == "past", np.uint8),
            threads=4,
        )
    assert restored is not None
    assert restored.sound
    rows_wanted = (blocks - 1) * 512 + 256
    for i, (s, copy) in enumerate(zip(streams, copies, strict=True)):
        filled = s.index(0, rows_wanted)
        expected = np.zeros_like(s.array)
        if i in wanted:
            expected[filled] = s.array[filled]
        assert copy.array.tobytes() == expected.tobytes()


def call(file: Stored, rows: list[Rows], first: Any, count: Any, sums: Any, **options: Any) -> Restored:
    """Restore everything."""
    restored = restore(
        file.source(), rows, file.offsets, first, count, count, sums, direct=np.ones(len(first), np.uint8), **options
    )
    assert restored is not None
    return restored


@pytest.mark.parametrize("cold", [False, True])
def test_a_wrong_byte(tmp_path: Path, cold: bool) -> None:
    """One wrong byte fails its stream of its block and no other, and whoever waits for that stream is told."""
    _, rows, payloads, first, count, sums = large_job(4)
    with stored(tmp_path, payloads) as file:
        at = int(file.offsets[2]) + 512 * 1024 + 12345  # in the second stream
        byte = os.pread(file.fd, 1, at)[0]
        os.pwrite(file.fd, bytes([byte ^ 1]), at)
        os.fsync(file.fd)
        if cold:
            file.drop()
        progress = np.zeros(5, np.int32)
        restored = call(file, rows, first, count, sums, progress=progress)
        assert restored.failed.tolist() == [-1, -1, 1, -1]
        assert not restored.errors.any()
        assert not restored.sound
        assert progress.tolist() == [1, -1, 1, 1, 1]


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    """A block that the file doesn't hold any more is an error in words; the others are restored."""
    streams, rows, payloads, first, count, sums = large_job(3)
    kept = [s.array.copy() for s in streams]
    with stored(tmp_path, payloads) as file:
        os.ftruncate(file.fd, int(file.offsets[2]) + 100)
        restored = call(file, rows, first, count, sums)
        assert [read_error(int(e)) if e else "" for e in restored.errors] == ["", "", "the file ends before it"]
        for s, old in zip(streams, kept, strict=True):
            whole = s.index(0, 1024)
            assert s.array[whole].tobytes() == old[whole].tobytes()


def test_waiting_for_a_stream(tmp_path: Path) -> None:
    """Another thread that waits is let go when its stream is in place, and one that waits for what never comes after its time."""
    streams, rows, payloads, first, count, sums = large_job(4)
    progress = np.zeros(5, np.int32)
    seen: list[int] = []
    expected = streams[0].array.tobytes()
    streams[0].array[...] = 0

    def wait() -> None:
        seen.append(progress_wait(progress, 0, 30.0))
        seen.append(int(streams[0].array.tobytes() == expected))

    with stored(tmp_path, payloads) as file:
        assert progress_wait(progress, 3, 0.01) == 0
        waiter = threading.Thread(target=wait)
        waiter.start()
        file.drop()
        call(file, rows, first, count, sums, progress=progress)
        waiter.join()
    assert seen == [1, 1]


def test_stopping(tmp_path: Path) -> None:
    """A restore that is stopped says so, names no block, and lets nobody believe that a stream came."""
    _, rows, payloads, first, count, sums = large_job(2)
    with stored(tmp_path, payloads) as file:
        progress = np.zeros(5, np.int32)
        stop = np.ones(1, np.int32)
        direct = np.ones(2, np.uint8)
        assert (
            restore(file.source(), rows, file.offsets, first, count, count, sums, direct=direct, progress=progress, stop=stop)
            is None
        )
        assert not progress.any()


def test_refusals(tmp_path: Path) -> None:
    """What doesn't fit, and payloads behind the map, are refused before a byte moves."""
    streams, rows, payloads, first, count, sums = large_job(2)
    direct = np.ones(2, np.uint8)
    for s in streams:
        s.array[...] = 7
    with stored(tmp_path, payloads) as file:
        source = file.source()
        good: dict[str, Any] = {"direct": direct}
        for change, message in (
            ({"direct": direct[:1]}, "direct"),
            ({"direct": direct.astype(np.int32)}, "direct"),
            ({"progress": np.zeros(4, np.int32)}, "progress"),
            ({"progress": np.zeros(5, np.int64)}, "progress"),
            ({"stop": np.zeros(2, np.int32)}, "stop"),
            ({"threads": 0}, "threads"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                restore(source, rows, file.offsets, first, count, count, sums, **{**good, **change})
        with pytest.raises(ValueError, match="beyond the"):
            restore(source, rows, file.offsets + np.uint64(8192), first, count, count, sums, direct=direct)
        with pytest.raises(ValueError, match="blocks overlap"):
            restore(source, rows, file.offsets, np.zeros(2, np.int64), count, count, sums, direct=direct)
        streams[1].array.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            restore(source, [s.rows() for s in streams], file.offsets, first, count, count, sums, direct=direct)
        assert all((s.array == 7).all() for s in streams)
        file.map.close()
        with pytest.raises(ValueError, match="closed"):
            file.source()
