"""Blocks prepared ahead of who publishes them, in order, on a thread of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from kvstore.blocks import PreparedBlock

__all__ = ["Ahead", "ComingRows"]

_PORTIONS_AHEAD = 4


class ComingRows(Mapping[int, PreparedBlock]):
    """The blocks of a piece by index, of which some may still be under way: who asks for one waits for it.

    Which there are is known without waiting. For one thread.

    Parameters
    ----------
    indices : range
        Those of the piece.
    following : callable
        Hands out the next portion of the save's blocks, once it is prepared.
    """

    def __init__(self, indices: range, following: Callable[[], Mapping[int, PreparedBlock]]) -> None:
        self._indices = indices
        self._following = following
        self._had: dict[int, PreparedBlock] = {}

    def __getitem__(self, index: int) -> PreparedBlock:
        if index not in self._indices:
            raise KeyError(index)
        while index not in self._had:  # the first ones may be left over from a piece that somebody else has stored
            self._had.update(self._following())
        return self._had[index]

    def __setitem__(self, index: int, block: PreparedBlock) -> None:
        """Put another block in the place of the one that was prepared."""
        if self[index] is not block:
            self._had[index] = block

    def __contains__(self, index: object) -> bool:
        return index in self._indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def had(self) -> Iterable[PreparedBlock]:
        """The blocks whose buffers are the piece's by now: those that were asked for, and all that came with them."""
        return self._had.values()


class Ahead:
    """Prepares the blocks of a save, in portions, so that a few are ready or under way beyond those that were handed out.

    A context manager: at its end what nobody asked for is given back. A single portion is prepared by who asks for it, which takes
    less than a thread does; and so are all where there is no thread to be had, as at the interpreter's end.

    Parameters
    ----------
    prepare : callable
        Given the first position of a portion, and where it ends, returns its blocks by index.
    release : callable
        Takes the buffers of blocks back that nobody looks at any more.
    positions : range
        What is saved, in steps of a portion: each begins at a block boundary.
    block_tokens : int
        Positions of a block.
    """

    def __init__(
        self,
        prepare: Callable[[int, int], dict[int, PreparedBlock]],
        release: Callable[[Iterable[PreparedBlock]], None],
        positions: range,
        block_tokens: int,
    ) -> None:
        self._prepare = prepare
        self._release = release
        self._stop = positions.stop
        self._step = positions.step
        self._size = block_tokens
        self._left = deque(positions)
        self._threaded = len(positions) > 1
        self._coming: deque[Future[dict[int, PreparedBlock]]] = deque()
        self._ready: deque[dict[int, PreparedBlock]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvstore-gather")

    def __enter__(self) -> Ahead:
        try:
            self._prepare_more()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._left.clear()
        with self._executor:
            for future in self._coming:
                if not future.cancel() and future.exception() is None:
                    self._ready.append(future.result())
        for portion in self._ready:
            self._release(portion.values())

    def rows(self, start: int, stop: int) -> ComingRows:
        """The blocks of [start, stop), which is a whole number of portions or ends where the save does.

        Returns when the first of them are prepared, so that nobody waits for those with a lock held.
        """
        if self._coming:
            wait([self._coming[0]])
        elif self._left and not self._ready:
            self._ready.append(self._prepare_at(self._left.popleft()))
        return ComingRows(range(start // self._size, -(-stop // self._size)), self._following)

    def _following(self) -> dict[int, PreparedBlock]:
        if self._ready:
            return self._ready.popleft()
        if not self._coming:
            return self._prepare_at(self._left.popleft())
        future = self._coming.popleft()
        self._prepare_more()
        return future.result()

    def _prepare_at(self, start: int) -> dict[int, PreparedBlock]:
        return self._prepare(start, min(start + self._step, self._stop))

    def _prepare_more(self) -> None:
        while self._threaded and self._left and len(self._coming) < _PORTIONS_AHEAD:
            try:
                self._coming.append(self._executor.submit(self._prepare_at, self._left[0]))
            except RuntimeError:  # too many threads, or the interpreter is going down
                self._threaded = False
            else:
                self._left.popleft()
