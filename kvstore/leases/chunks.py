"""Copying a prefix chunk by chunk through a few small buffers, the next chunks while somebody reads the one before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvstore.errors import ArrayError, TransferCancelled
from kvstore.kernel import progress_end, progress_set, progress_wait
from kvstore.leases.described import HostBuffer
from kvstore.leases.transfer import LOOK_SECONDS, Source, Work

__all__ = ["Chunk", "Chunks", "start_chunks"]

_THREAD, _TAKER = "thread", "taker"


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some positions of a prefix, and where their rows go.

    Attributes
    ----------
    start, stop : int
        The positions [start, stop).
    buffer : HostBuffer
        With room for at least that many; index 0 of its arrays is the row of `start`.
    """

    start: int
    stop: int
    buffer: HostBuffer


class _Filling(Work):
    """Chunks into their buffers, by one call of the kernel, which tells of each as soon as it is in place."""

    def __init__(self, source: Source, chunks: Sequence[Chunk], ahead: int, threads: int | None) -> None:
        names = chunks[0].buffer.arrays
        super().__init__(source, [stream for stream in source.scope.layout.streams if stream.name in names])
        buffers = {id(chunk.buffer): chunk.buffer for chunk in chunks}
        places = {key: place for place, key in enumerate(buffers)}
        self._targets = [buffer.target() for buffer in buffers.values()]
        self._claimed: list[HostBuffer] = []
        self._sides: set[str] = set()
        self._which = [places[id(chunk.buffer)] for chunk in chunks]
        self._bounds = [(chunk.start, chunk.stop) for chunk in chunks]
        self._ahead = ahead
        self._threads = threads
        self._stop_flag = np.zeros(1, np.int32)
        self.filled = np.zeros(len(chunks), np.int32)
        self.taken = np.zeros(len(chunks), np.int32)

    def claim(self, buffers: Iterable[HostBuffer]) -> None:
        """Have the buffers to itself: what was checked for somebody is his until he has taken it."""
        for buffer in buffers:
            self._claimed.append(buffer)
            buffer.claim(self)

    def let_go(self, side: str) -> None:
        """Give the buffers back, once neither the thread writes to them nor anybody takes chunks. From any thread, also twice."""
        if os.getpid() != self._pid:
            return  # in a child nothing is in use, and a thread that isn't there may hold the lock
        with self.changed:  # of two that come at once, one gives them back: by then they may be another filling's
            self._sides.add(side)
            claimed: list[HostBuffer] = []
            if len(self._sides) == 2:
                claimed, self._claimed = self._claimed, claimed
        for buffer in claimed:
            buffer.give_back(self)

    def copy(self) -> None:
        """See `Work.copy`."""
        if not self.source.filler.chunks(
            self._targets,
            self._which,
            self._bounds,
            filled=self.filled,
            taken=self.taken,
            ahead=self._ahead,
            stop=self._stop_flag,
            threads=self._threads,
        ):
            self.check_stop()
        self.source.restored(self.streams, self._bounds[-1][1] - self._bounds[0][0])

    def ended(self) -> None:
        """See `Work.ended`."""
        progress_end(self.filled)

    def stop(self) -> None:
        """See `Work.stop`."""
        super().stop()
        self._stop_flag[0] = 1
        progress_end(self.taken)

    def count(self) -> int:
        """See `Work.count`."""
        return len(self.streams) if (self.filled == 1).all() else 0

    def release(self) -> None:
        """See `Work.release`."""
        self._targets = []
        self.let_go(_THREAD)


class Chunks:
    """Chunks of a prefix, each handed out once it is in place and every byte of it is checked. For one thread at a time.

    The next chunks are copied while the caller reads the one that he was given last; asking for the next one gives that one's
    buffer back. Use it in a `with` block, and a `for` loop in that: leaving the block early ends the copying. It pins the lease's
    bytes until it is over, so the lease may end before it.
    """

    def __init__(self, work: _Filling, chunks: Sequence[Chunk]) -> None:
        self._work = work
        self._chunks = list(chunks)
        self._next = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Give the last chunk back and wait for the next one.

        Raises
        ------
        BlockDamaged
            When a byte of it isn't what was saved. Its buffer's contents are undefined then, and the block is refused from now on.
        TransferCancelled
            After `close`.
        """
        work = self._work
        work.check_process()
        if self._closed and self._next < len(self._chunks):
            raise TransferCancelled("these chunks were closed before all were taken")
        if 0 < self._next <= len(self._chunks):
            progress_set(work.taken, self._next - 1, 1)
        if self._next >= len(self._chunks):
            self._next = len(self._chunks) + 1
            self._finish()
            raise StopIteration
        while not (value := progress_wait(work.filled, self._next, LOOK_SECONDS)):
            pass  # so that an interrupt is answered
        if value < 0:
            self._finish()
            raise TransferCancelled("the chunk was not filled")  # never: what ended the work was raised
        chunk = self._chunks[self._next]
        self._next += 1
        return chunk

    def _finish(self) -> None:
        """Wait for the end of the work, and raise its error."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: self._work.over)
        self._work.let_go(_TAKER)
        self._work.check()

    def close(self) -> None:
        """End the copying, and wait until nothing touches the buffers any more. Idempotent."""
        work = self._work
        work.check_process()
        self._closed = True
        if not work.over:
            work.stop()
        work.join()
        work.let_go(_TAKER)

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is not None:
            work.abandon()
            work.let_go(_TAKER)


def start_chunks(source: Source, chunks: Sequence[Chunk], ahead: int, threads: int | None) -> Chunks:
    """Start copying chunks; see `Lease.chunks`."""
    layout = source.scope.layout
    if not chunks or ahead < 0:
        raise ArrayError(f"expected a chunk or more, and some or none ahead, got {len(chunks)} and {ahead}")
    at = chunks[0].start
    for chunk in chunks:
        buffer = chunk.buffer
        if chunk.start != at or chunk.start % layout.block_tokens or not chunk.start < chunk.stop <= source.length:
            raise ArrayError(
                f"a chunk of positions [{chunk.start}, {chunk.stop}): expected it to start at {at}, at a multiple of "
                f"{layout.block_tokens}, the tokens of a block, and to end within [0, {source.length}), what the lease holds"
            )
        if chunk.stop - chunk.start > buffer.tokens:
            raise ArrayError(f"a chunk of positions [{chunk.start}, {chunk.stop}) for a buffer of {buffer.tokens}")
        if buffer.layout is not layout and buffer.layout != layout:
            raise ArrayError("a chunk's buffer was made for another layout than the lease's")
        if buffer.arrays.keys() != chunks[0].buffer.arrays.keys():
            raise ArrayError(f"the chunks' buffers have different streams: {sorted(buffer.arrays)} and others")
        at = chunk.stop
    work = _Filling(source, chunks, ahead, threads)
    handle = Chunks(work, chunks)  # before the thread is there: whatever comes in between, it is closed
    try:
        work.claim({id(chunk.buffer): chunk.buffer for chunk in chunks}.values())
        work.start()
    except BaseException:
        del handle._work  # nobody has it
        work.let_go(_TAKER)
        if work.withdraw():
            work.let_go(_THREAD)
        raise
    return handle
