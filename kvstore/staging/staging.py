"""Page-aligned host buffers under a budget, pinned where there is a device to read them."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.errors import DeviceError, DriverMissingError, StagingBusyError, StagingClosedError
from kvstore.kernel import CudaDevice, CudaDriver

__all__ = ["Staging", "StagingBuffer"]

_log = logging.getLogger("kvstore")

_CHECK_SECONDS = 0.05

# memory that a broken device may still read: never unmapped, or a new mapping there would be read in its stead
_kept_for_ever: list[mmap.mmap] = []


class StagingBuffer:
    """One buffer of a `Staging`: the caller's from `take` to `give`.

    Attributes
    ----------
    array : uint8 array of shape (chunk_bytes,)
        Page-aligned; its contents are undefined when it is taken. Keep no view of it after `give`.
    address : int
        Where it lies.
    pinned : bool
        Whether it is page-locked, so that a device reads it at the full speed of the link, and while the host goes on.
    """

    __slots__ = ("_map", "address", "array", "pinned")

    def __init__(self, memory: mmap.mmap, pinned: bool) -> None:
        self._map: mmap.mmap | None = memory
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = self.array.__array_interface__["data"][0]
        self.pinned = pinned


class Staging:
    """Page-aligned host buffers of one size, reused, with a budget over all of them. Thread-safe.

    With a CUDA driver on the machine they are pinned for a device. Memory is taken from the system when it is first
    needed and kept until `close`. A buffer that can't be pinned (`ulimit -l`, memory short) is used as it is, which is slower:
    the first one is logged, all are counted in `unpinned`. Not usable in a forked child. Use it in a `with` block, or close it.

    Parameters
    ----------
    budget_bytes : int
        The most that all buffers take together; room for at least one. A copy to a device uses two at a time.
    chunk_bytes : int
        The size of a buffer, rounded up to whole pages. Has to hold a block's rows of any one stream.
    device : int, optional
        The device that the buffers are pinned for. By default the first one where there is a CUDA driver and a device; else
        the buffers are plain memory.
    driver : str, optional
        Path of the driver's library; by default the system's `libcuda.so.1`.
    timeout : float
        Seconds that `take` waits for a buffer unless told.

    Attributes
    ----------
    chunk_bytes : int
        The size of a buffer.
    buffers : int
        How many the budget allows.
    device : CudaDevice or None
        The device, if there is one.

    Raises
    ------
    ValueError
        The budget doesn't hold one buffer, or a number is below 1.
    DriverMissingError, DeviceError
        A device or a driver was asked for and can't be used.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        chunk_bytes: int = 8 << 20,
        device: int | None = None,
        driver: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        self.chunk_bytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.buffers = budget_bytes // self.chunk_bytes
        if self.buffers < 1:
            raise ValueError(
                f"a budget of {budget_bytes} bytes holds no buffer of {self.chunk_bytes}: raise it, or lower chunk_bytes"
            )
        self._timeout = timeout
        self._pid = os.getpid()
        self._idle: list[StagingBuffer] = []
        self._out: set[StagingBuffer] = set()
        self._lost = 0
        self._unpinned = 0
        self._closed = False
        self._free = threading.Condition()
        self.device = _device(device, driver)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def in_use(self) -> int:
        """Buffers that are taken now."""
        return len(self._out)

    @property
    def unpinned(self) -> int:
        """Buffers that were to be pinned and could not be."""
        return self._unpinned

    def take(self, timeout: float | None = None) -> StagingBuffer:
        """Take one buffer; see `take_many`."""
        return self.take_many(1, timeout)[0]

    def take_many(
        self, count: int, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> list[StagingBuffer]:
        """Take several buffers at once: all or none, so that two who want two each never wait for each other.

        Parameters
        ----------
        count : int
            How many, at most `buffers`.
        timeout : float, optional
            Seconds to wait for others to give theirs back; by default the one of the constructor.
        check : callable, optional
            Called while it waits, some times a second; may raise to end that.

        Raises
        ------
        ValueError
            More than the budget allows.
        StagingBusyError
            They did not come free in time.
        StagingClosedError
            After `close`, or in a forked child.
        """
        if not 1 <= count <= self.buffers:
            raise ValueError(f"{count} buffers asked for, the budget holds 1 to {self.buffers} of {self.chunk_bytes} bytes")
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        with self._free:
            while True:
                self._check_open()
                if self.buffers - self._lost - len(self._out) >= count:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StagingBusyError(
                        f"{count} of {self.buffers} staging buffers of {self.chunk_bytes} bytes did not come free in {limit} s: "
                        f"{len(self._out)} are in use and {self._lost} lost to device errors; raise the budget or the time limit"
                    )
                self._free.wait(left if check is None else min(left, _CHECK_SECONDS))
                if check is not None:
                    check()
            taken: list[StagingBuffer] = []
            try:
                while len(taken) < count:
                    taken.append(self._idle.pop() if self._idle else self._make())
            except BaseException:
                self._idle += taken
                raise
            self._out.update(taken)
        return taken

    def give(self, buffer: StagingBuffer) -> None:
        """Give a buffer back. Nobody may use it any more, the device included.

        Raises
        ------
        ValueError
            It isn't one that was taken here.
        """
        with self._free:
            self._come_back(buffer)
            if self._closed:
                self._unmake(buffer)
            else:
                self._idle.append(buffer)
            self._free.notify_all()

    def retire(self, buffer: StagingBuffer) -> None:
        """Give a buffer back that the device may still be reading, because waiting for it failed: it is not used again.

        Its place in the budget comes free if the driver lets go of the memory; else the memory stays mapped for ever.
        """
        with self._free:
            self._come_back(buffer)
            self._unmake(buffer)
            self._free.notify_all()

    def close(self) -> None:
        """Give all memory back, and the device; what is in use now follows when it is given back. Idempotent."""
        if os.getpid() != self._pid:
            return  # a child's driver can't be called, and the memory is the parent's
        with self._free:
            if self._closed:
                return
            self._closed = True
            while self._idle:
                self._unmake(self._idle.pop())
            self._free.notify_all()
        if self.device is not None:
            try:
                self.device.drop()
            except DeviceError as error:
                _log.warning("a device was not released: %s", error)

    def __del__(self) -> None:
        if hasattr(self, "device"):
            with contextlib.suppress(Exception):  # at the interpreter's end not everything that this needs is left
                self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StagingClosedError("these staging buffers were made before this process was forked; make new ones in the child")
        if self._closed:
            raise StagingClosedError("these staging buffers are closed; make new ones with Staging(...)")

    def _come_back(self, buffer: StagingBuffer) -> None:
        if buffer not in self._out:
            raise ValueError("this buffer was not taken here, or has been given back already")
        self._out.remove(buffer)

    def _make(self) -> StagingBuffer:
        # shared with forked children, who have no use for it: after a fork, writing to private memory may move it to new pages,
        # while the device goes on reading the old ones
        buffer = StagingBuffer(mmap.mmap(-1, self.chunk_bytes), pinned=False)
        if self.device is not None:
            self.device.hold()  # the buffer outlives a close
            try:
                self.device.pin(buffer.address, self.chunk_bytes)
                buffer.pinned = True
            except DeviceError as error:
                with contextlib.suppress(DeviceError):
                    self.device.unpin(buffer.address)  # it may have been pinned before something else failed
                self._unpinned += 1
                (_log.warning if self._unpinned == 1 else _log.debug)(
                    "staging buffers are not pinned, copies to the device are slower: %s", error
                )
        return buffer

    def _unmake(self, buffer: StagingBuffer) -> None:
        memory, buffer._map = buffer._map, None
        if buffer.pinned and self.device is not None:
            try:
                self.device.unpin(buffer.address)
            except DeviceError as error:
                _log.warning("a staging buffer stays in memory for ever, the driver does not let go of it: %s", error)
                assert memory is not None
                _kept_for_ever.append(memory)
                self._lost += 1
        buffer.array = np.empty(0, np.uint8)  # the memory goes with the last view of it
        if self.device is not None:
            try:
                self.device.drop()
            except DeviceError as error:
                _log.warning("a device was not released: %s", error)


def _device(ordinal: int | None, path: str | None) -> CudaDevice | None:
    try:
        return CudaDriver.load(path).device(ordinal or 0)
    except DeviceError as error:
        if ordinal is not None or path is not None:
            raise
        if not isinstance(error, DriverMissingError):
            _log.warning("staging buffers are plain memory, the device cannot be used: %s", error)
        return None
