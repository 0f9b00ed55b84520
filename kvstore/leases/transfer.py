"""Copies that run on a thread of their own, stream after stream, so that who asked can start on the first ones."""

from __future__ import annotations

import atexit
import copy
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np

from kvstore.errors import ArrayError, ForkedStoreError, TransferCancelled, TransferTimeout
from kvstore.kernel import Rows, check_destinations, progress_end, progress_wait
from kvstore.layout import Stream
from kvstore.leases.fill import Filler
from kvstore.leases.located import Located
from kvstore.leases.pin import Pin
from kvstore.scope import NamespaceScope

__all__ = ["LOOK_SECONDS", "Source", "Transfer", "Work", "late", "start_copy"]

_log = logging.getLogger("kvstore")
_T = TypeVar("_T", bound="Transfer")

LOOK_SECONDS = 0.2  # how long a wait leaves an interrupt unanswered
_EXIT_SECONDS = 5.0  # what the end of the interpreter waits for transfers that it has cancelled


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a transfer copies from: a lease's bytes, without the lease.

    Attributes
    ----------
    scope : NamespaceScope
        Where the blocks belong.
    pin : Pin
        What keeps them in place. The transfer holds it until it is over.
    filler : Filler
        What copies and checks.
    located : Located
        The blocks of rows.
    length : int
        Leading tokens of the lease.
    """

    scope: NamespaceScope
    pin: Pin
    filler: Filler
    located: Located
    length: int

    def skipped(self) -> list[Rows]:
        """Rows for a copy that leaves all streams out."""
        return [Rows.skip(row_bytes=s.row_bytes, tokens_per_row=s.tokens_per_row) for s in self.scope.layout.streams]

    def restored(self, streams: Iterable[Stream], tokens: int) -> None:
        """Count what was copied: so many positions of these streams."""
        self.scope.store.counters.restored_bytes += sum(s.rows(tokens) * s.row_bytes for s in streams)


class Work:
    """What a transfer's thread does. It holds all that it touches, and no reference to the handle that the caller has.

    Subclasses say in `copy` what is done; it raises what went wrong, and when it returns or raises nothing touches the
    destinations any more.
    """

    def __init__(self, source: Source, streams: Sequence[Stream]) -> None:
        self.source = source
        self.streams = tuple(streams)
        # re-entrant, because a handle may die in a garbage collection that starts while the lock is held
        self.changed = threading.Condition(threading.RLock())
        self.reached: set[str] = set()
        self.error: BaseException | None = None
        self.over = False
        self._stop = False
        self._told = False  # the error was raised to somebody, or logged
        self._abandoned = False
        self._begun = False  # by the thread
        self._withdrawn = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvstore-transfer", daemon=True)

    def copy(self) -> None:
        """Do the work on the transfer's thread."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of the destinations: the work is over."""

    def ended(self) -> None:
        """Called once the work is over, and its error, if there is one, can be seen."""

    def wait(self, name: str, timeout: float | None) -> None:
        """Wait until a stream is in place; see `Transfer.wait`."""
        with self.changed:
            self.await_for(lambda: name in self.reached, timeout, f"stream {name!r}")

    def ready(self, name: str) -> bool:
        """Whether a stream is in place; see `Transfer.ready`."""
        with self.changed:
            self.check()
            return name in self.reached

    def count(self) -> int:
        """How many streams are in place, or on their way to a device."""
        return len(self.reached)

    def start(self) -> None:
        """Begin. If that fails nothing is held, and nothing is written any more."""
        self.source.pin.hold()
        try:
            _live.add(self)
            self._thread.start()
        except BaseException:
            if self.withdraw():
                _live.discard(self)
                self.source.pin.drop()
            else:  # an interrupt, and the thread has begun all the same
                self.stop()
                self.join()
            raise

    def withdraw(self) -> bool:
        """Have it never begin, where `start` has failed. False if it has begun: then its thread lets go of what it holds."""
        with self.changed:
            self._withdrawn = not self._begun
            return self._withdrawn

    def _run(self) -> None:
        with self.changed:
            if self._withdrawn:
                return
            self._begun = True
        error: BaseException | None = None
        for step in (self.copy, self.release, self.source.pin.drop):
            try:
                step()
            except BaseException as raised:
                error = error or raised
                _forget_frames(raised)
        _live.discard(self)
        with self.changed:
            self.error, self.over = error, True
            self.changed.notify_all()
            if self._abandoned:
                self._log_error()
        self.ended()

    def reach(self, *names: str) -> None:
        """Let those go on who wait for these streams."""
        with self.changed:
            self.reached.update(names)
            self.changed.notify_all()

    def check_stop(self) -> None:
        """Raise TransferCancelled if that was asked for."""
        if self._stop:
            raise TransferCancelled("the transfer was cancelled; what it has written is undefined")

    def check_process(self) -> None:
        """Refuse a forked child: the thread is the parent's."""
        if os.getpid() != self._pid:
            raise ForkedStoreError("this transfer was begun before the process was forked; it goes on in the parent only")

    def stop(self) -> None:
        """Ask the thread to end soon."""
        self._stop = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def await_for(self, there: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until something is there or the work is over, and raise its error if it failed. `changed` is held."""
        if not self.changed.wait_for(lambda: self.over or there(), timeout):
            raise late(what, timeout)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the work, if one did."""
        if self.error is not None:
            self._told = True
            # A copy: an error that is raised collects the frames it passes, and the work would keep them, and their arrays.
            raise copy.copy(self.error) from self.error

    def abandon(self) -> None:
        """Nobody waits any more: end early, unless all streams are on their way, and tell the log what nobody was told."""
        if os.getpid() != self._pid:
            return  # a child has a copy of the handle, and of the lock as it was
        with self.changed:
            if self.over:
                self._log_error()
                return
            self._abandoned = True
            if self.count() < len(self.streams):
                _log.warning(
                    "a transfer was dropped before it was finished: it is cancelled; wait for its end or use it in a with block"
                )
                self.stop()

    def _log_error(self) -> None:
        if self.error is not None and not self._told and not isinstance(self.error, TransferCancelled):
            self._told = True
            _log.error("a transfer failed and nobody asked: %s: %s", type(self.error).__name__, self.error)


def _forget_frames(error: BaseException) -> None:
    """Take the frames from an error that is kept, and from those that led to it: what they hold would live as long as it."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            left.extend(other for other in (one.__cause__, one.__context__) if other is not None)


def late(what: str, timeout: float | None) -> TransferTimeout:
    """The error of a wait that took too long."""
    return TransferTimeout(f"{what} did not come within {timeout} s; the transfer goes on, wait again or cancel it")


class Transfer:
    """A copy under way: what it copies can be waited for stream by stream, in layout order. Thread-safe.

    Use it in a `with` block: leaving it finishes the transfer, and leaving it by an exception cancels it. If it fails, what
    was done with early streams is to be thrown away: waits raise its error from then on, also for streams that are there. It
    pins the lease's bytes until it is over, so the lease may end before it. One that is dropped without being finished is
    cancelled; its error, if nobody was told, is logged.

    Attributes
    ----------
    names : tuple of str
        The streams, in the order in which they come.
    """

    def __init__(self, work: Work) -> None:
        self.names = tuple(stream.name for stream in work.streams)
        self._work = work

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.cancel()

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is not None:
            work.abandon()

    def wait(self, name: str, timeout: float | None = None) -> None:
        """Wait until a stream's rows are in place and checked.

        Parameters
        ----------
        name : str
            One of `names`.
        timeout : float, optional
            Seconds; for ever by default.

        Raises
        ------
        ArrayError
            The transfer has no such stream.
        TransferTimeout
            They did not come in time; the transfer goes on.
        BlockDamaged, TransferCancelled
            What ended the transfer.
        """
        self._known(name).wait(name, timeout)

    def ready(self, name: str) -> bool:
        """Whether `wait` would return at once. Raises what `wait` raises, but never waits."""
        return self._known(name).ready(name)

    def finish(self, timeout: float | None = None) -> None:
        """Wait until everything is in place and checked. Raises as `wait`."""
        work = self._work
        work.check_process()
        with work.changed:
            work.await_for(lambda: False, timeout, "the end of the transfer")

    def cancel(self) -> None:
        """End the transfer soon, and wait until nothing touches the destinations any more. Does nothing once it is over.

        What was written is undefined. Waits raise TransferCancelled from then on, unless all was in place already.
        """
        self._work.check_process()
        self._work.stop()
        self._work.join()

    def _known(self, name: str) -> Work:
        if name not in self.names:
            raise ArrayError(f"the transfer has no stream {name!r}; it has {list(self.names)}")
        self._work.check_process()
        return self._work

    def __repr__(self) -> str:
        work = self._work
        state = "failed" if work.error is not None else "done" if work.over else "under way"
        return f"<{type(self).__name__} {state}: {work.count()} of {len(self.names)} streams>"


class _HostCopy(Work):
    """Streams into the caller's arrays, by one call of the kernel, which tells of each stream as soon as it is in place."""

    def __init__(
        self, source: Source, rows: Sequence[Rows], named: Sequence[int], blocks: slice, tokens: int, threads: int | None
    ) -> None:
        layout = source.scope.layout
        super().__init__(source, [layout.streams[i] for i in named])
        self._rows: list[Rows] = list(rows)
        self._blocks, self._tokens = blocks, tokens
        self._index = {layout.streams[i].name: i for i in named}
        self._progress = np.zeros(len(self._rows), np.int32)
        for index in named:
            if self._rows[index].skipped:  # it has no rows yet
                self._progress[index] = 1
        self._stop_flag = np.zeros(1, np.int32)
        self._threads = threads

    def copy(self) -> None:
        """See `Work.copy`."""
        if not self.source.filler.rows(
            self._rows,
            blocks=self._blocks,
            tokens=self._tokens,
            progress=self._progress,
            stop=self._stop_flag,
            threads=self._threads,
        ):
            self.check_stop()
        self.source.restored(self.streams, self._tokens)

    def ended(self) -> None:
        """See `Work.ended`."""
        progress_end(self._progress)

    def stop(self) -> None:
        """See `Work.stop`."""
        super().stop()
        self._stop_flag[0] = 1

    def count(self) -> int:
        """See `Work.count`."""
        return sum(int(self._progress[index]) == 1 for index in self._index.values())

    def ready(self, name: str) -> bool:
        """See `Work.ready`."""
        with self.changed:
            self.check()
        return progress_wait(self._progress, self._index[name], 0) == 1

    def wait(self, name: str, timeout: float | None) -> None:
        """See `Work.wait`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not (value := progress_wait(self._progress, self._index[name], min(deadline - time.monotonic(), LOOK_SECONDS))):
            if time.monotonic() >= deadline:
                raise late(f"stream {name!r}", timeout)
        with self.changed:
            if value < 0:  # the rest is still copied, so that every damaged block is found
                left = None if timeout is None else max(deadline - time.monotonic(), 0)
                self.await_for(lambda: False, left, f"stream {name!r}")
            self.check()

    def release(self) -> None:
        """See `Work.release`."""
        self._rows = []


def start_copy(
    source: Source, rows: Sequence[Rows], named: Sequence[int], blocks: slice, tokens: int, threads: int | None
) -> Transfer:
    """Start copying streams into arrays.

    Parameters
    ----------
    source : Source
        The lease's bytes.
    rows : sequence of Rows
        One for each stream of the layout; skipped where it isn't wanted or has no rows yet.
    named : sequence of int
        The streams that were asked for, ascending.
    blocks, tokens, threads
        As for `Filler.rows`.

    Raises
    ------
    ArrayError
        When the memory can't be written, before a byte moves.
    """
    try:
        check_destinations(rows)
    except ValueError as error:
        raise ArrayError(f"the destinations cannot be written: {error}") from error
    work = _HostCopy(source, rows, named, blocks, tokens, threads)
    work.start()
    return Transfer(work)


_live: set[Work] = set()


def _end_all() -> None:
    """Cancel what is under way when the interpreter ends, so that no thread copies while the process is taken down."""
    works = list(_live)
    for work in works:
        work.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for work in works:
        work.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
