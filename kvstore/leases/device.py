"""Copies of a lease to a device: one chunk is filled and checked while the one before is on its way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.arrays import check_named
from kvstore.errors import ArrayError, DeviceError
from kvstore.kernel import CudaDevice, CudaEvent, Rows, check_destinations
from kvstore.leases.destinations import Destination
from kvstore.leases.transfer import Source, Transfer, Work, late
from kvstore.staging import Staging, StagingBuffer

__all__ = ["DeviceTransfer", "start_device_copy"]

_log = logging.getLogger("kvstore")

_POLL_SECONDS = (20e-6, 1e-3)  # between looks at an event that is waited for with a time limit: at first, and at most


class DeviceTransfer(Transfer):
    """A copy to a device under way; see `Transfer`.

    What is waited for with a CUDA stream has been queued, and checked on the host, but need not be there yet when `wait` returns.
    """

    _work: _DeviceCopy

    def wait(self, name: str, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Wait until a stream's rows are on the device.

        Parameters
        ----------
        name : str
            One of `names`.
        timeout : float, optional
            Seconds; for ever by default.
        stream : int, optional
            A CUDA stream that is to wait in the caller's stead: what is queued on it from here on runs when the rows are
            there. The call itself then waits only until the last copy of the rows has been queued.

        Raises
        ------
        ArrayError
            The transfer has no such stream.
        TransferTimeout
            They did not come in time; the transfer goes on.
        BlockDamaged, DeviceError, StagingBusyError, TransferCancelled
            What ended the transfer.
        """
        self._known(name)
        self._work.wait(name, timeout, stream)

    def ready(self, name: str) -> bool:
        """Whether the stream's rows are on the device. Raises what `wait` raises, but never waits."""
        self._known(name)
        return self._work.ready(name)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of some blocks that go through one buffer."""

    blocks: slice
    tokens: int
    first: int
    rows: int


class _DeviceCopy(Work):
    """Streams to a device, through a ring of staging buffers."""

    def __init__(
        self,
        source: Source,
        destinations: Sequence[Destination],
        staging: Staging,
        device: CudaDevice,
        on: int,
        own: bool,
        threads: int | None,
        ring: int,
    ) -> None:
        super().__init__(source, [d.stream for d in destinations])
        self._destinations = tuple(destinations)
        self._staging = staging
        self._device = device
        self._on, self._own = on, own
        self._threads = threads
        self._chunks = [_chunks(source, d, staging.chunk_bytes) for d in destinations]
        self._skipped = source.skipped()
        self._index = {stream.name: index for index, stream in enumerate(source.scope.layout.streams)}
        self._ring = min(ring, sum(map(len, self._chunks)))
        self._events: dict[str, CudaEvent] = {}  # by stream, set behind its last copy
        self._users = 0  # threads that use an event outside the lock
        self._failing = False  # the error comes when the device is done with what was queued

    def wait(self, name: str, timeout: float | None, stream: int | None = None) -> None:
        """See `DeviceTransfer.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            self.await_for(lambda: name in self.reached and not self._failing, timeout, f"stream {name!r}")
            event = self._events.get(name)
            if event is None:
                return
            if stream is not None:
                event.hold_back(stream)
                return
            self._users += 1
        try:
            if deadline is None:
                event.synchronize()
            elif not _poll(event, deadline):
                raise late(f"stream {name!r}", timeout)
        finally:
            with self.changed:
                self._users -= 1
                self.changed.notify_all()

    def ready(self, name: str) -> bool:
        """See `DeviceTransfer.ready`."""
        with self.changed:
            self.check()
            event = self._events.get(name)
            return name in self.reached and not self._failing and (event is None or event.reached())

    def copy(self) -> None:
        """See `Work.copy`."""
        ring: list[tuple[StagingBuffer, CudaEvent]] = []
        buffers: list[StagingBuffer] = []
        quiet = True
        try:
            if self._ring:
                buffers = self._staging.take_many(self._ring, check=self.check_stop)
                ring.extend((buffer, self._device.create_event()) for buffer in buffers)
                quiet = False
            self._copy_all(ring)
            quiet = True
        except BaseException:
            with self.changed:
                self._failing = True
            raise
        finally:
            quiet = quiet or self._quieten()
            self._settle([event for _, event in ring])
            for buffer in buffers:
                (self._staging.give if quiet else self._staging.retire)(buffer)
        self.source.restored(self.streams, self.source.length)

    def _copy_all(self, ring: list[tuple[StagingBuffer, CudaEvent]]) -> None:
        count = 0
        last: CudaEvent | None = None
        for destination, chunks in zip(self._destinations, self._chunks, strict=True):
            for chunk in chunks:
                self.check_stop()
                buffer, copied = ring[count % len(ring)]
                if count >= len(ring):
                    copied.synchronize()  # what was in the buffer is on the device
                count += 1
                self._fill(buffer, destination, chunk)
                for piece in destination.pieces(chunk.first, chunk.rows):
                    source = buffer.address + piece.source
                    if piece.height == 1:
                        self._device.copy(self._on, piece.target, source, piece.width)
                    else:
                        self._device.copy_pitched(self._on, piece.target, piece.pitch, source, piece.width, piece.height)
                copied.record(self._on)
            if chunks:
                last = self._device.create_event()
                with self.changed:
                    self._events[destination.stream.name] = last
                last.record(self._on)
            self.reach(destination.stream.name)
        if last is not None:
            last.synchronize()  # it stands behind everything

    def _fill(self, buffer: StagingBuffer, destination: Destination, chunk: _Chunk) -> None:
        """Bring a chunk's rows into the buffer, in the order in which the destination has them, and check them."""
        stream = destination.stream
        array = buffer.array[: chunk.rows * stream.row_bytes].view(stream.view_dtype).reshape(stream.array_shape(chunk.tokens))
        rows = list(self._skipped)
        rows[self._index[stream.name]] = Rows.strided(array, axis=stream.token_axis, tokens_per_row=stream.tokens_per_row)
        self.source.filler.rows(rows, blocks=chunk.blocks, threads=self._threads)

    def _quieten(self) -> bool:
        """After a failure: wait until the device reads no buffer any more; False if that cannot be had."""
        waits: tuple[Callable[[], None], ...] = (lambda: self._device.synchronize_stream(self._on), self._device.synchronize)
        for wait in waits:
            try:
                wait()
            except DeviceError as error:
                _log.warning("waiting for the copies of a failed transfer: %s", error)
            else:
                return True
        return False

    def _settle(self, events: list[CudaEvent]) -> None:
        """Give events and stream back to the driver, once no thread uses them; waits return at once from here on."""
        with self.changed:
            events += self._events.values()
            self._events.clear()
            self.changed.wait_for(lambda: not self._users)
        for event in events:
            _quietly(event.close)
        if self._own:
            self._own = False
            _quietly(lambda: self._device.destroy_stream(self._on))

    def release(self) -> None:
        """See `Work.release`."""
        self._settle([])
        for destination in self._destinations:
            destination.release()
        self._destinations = ()
        _quietly(self._device.drop)


def start_device_copy(
    source: Source, given: Mapping[str, object], staging: Staging, stream: int | None, threads: int | None, ring: int
) -> DeviceTransfer:
    """Start copying streams to a device; see `Lease.to_device`."""
    layout = source.scope.layout
    check_named(layout, given, all_of_them=False)
    if ring < 1 or (source.length and ring > staging.buffers):
        raise ArrayError(f"a ring of {ring} chunks asked for, the staging buffers allow 1 to {staging.buffers}")
    device = staging.device
    if device is None:
        raise DeviceError("the staging buffers have no device: there was no CUDA driver when they were made; use copy_into")
    device.hold()
    own: int | None = None
    destinations: list[Destination] = []
    work: _DeviceCopy | None = None
    try:
        if stream is None:
            own = device.create_stream()
        on = own if stream is None and own is not None else int(stream or 0)
        named = [s for s in layout.streams if s.name in given]
        destinations.extend(Destination(s, given[s.name], source.length, device, on) for s in named)
        _check_apart(destinations)
        _order(device, destinations, on)
        work = _DeviceCopy(source, destinations, staging, device, on, own is not None, threads, ring)
        work.start()
    except BaseException:
        if work is not None and not work.withdraw():
            raise  # its thread lets go of all this
        for destination in destinations:
            destination.release()
        if own is not None:
            _quietly(lambda: device.destroy_stream(own))
        _quietly(device.drop)
        raise
    return DeviceTransfer(work)


def _chunks(source: Source, destination: Destination, chunk_bytes: int) -> list[_Chunk]:
    """Cut a stream's rows into runs of whole blocks that fit a buffer."""
    stream, located = destination.stream, source.located
    if destination.rows is None:
        return []
    block_bytes = stream.rows(source.scope.layout.block_tokens) * stream.row_bytes
    longest = min(block_bytes, stream.rows(source.length) * stream.row_bytes)
    if longest > chunk_bytes:
        raise ArrayError(
            f"stream {stream.name!r}: the rows of a block take {longest} bytes, a staging buffer has {chunk_bytes}: "
            f"use Staging(chunk_bytes={longest})"
        )
    step = max(1, chunk_bytes // block_bytes)
    chunks = []
    for begin in range(0, len(located), step):
        end = min(begin + step, len(located))
        start = int(located.start[begin])
        tokens = int(located.start[end - 1] + located.used[end - 1]) - start
        if rows := stream.rows(tokens):
            chunks.append(_Chunk(slice(begin, end), tokens, stream.rows(start), rows))
    return chunks


def _check_apart(destinations: Sequence[Destination]) -> None:
    try:
        check_destinations([d.rows for d in destinations if d.rows is not None])
    except ValueError as error:
        names = [d.stream.name for d in destinations if d.rows is not None]
        raise ArrayError(f"the destinations cannot be written ({names} in order): {error}") from error


def _order(device: CudaDevice, destinations: Sequence[Destination], on: int) -> None:
    """Let the copies wait for what was queued on the destinations before."""
    for after in {d.after for d in destinations if d.after is not None and d.after != on}:
        event = device.create_event()
        try:
            event.record(after)
            event.hold_back(on)
        finally:
            event.close()


def _poll(event: CudaEvent, deadline: float) -> bool:
    pause, most = _POLL_SECONDS
    while not event.reached():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, most)
    return True


def _quietly(call: Callable[[], None]) -> None:
    """Give something back; a failure is for the log, since the bytes are where they should be, or their error counts more."""
    try:
        call()
    except DeviceError as error:
        _log.warning("a device's resource was not given back: %s", error)
