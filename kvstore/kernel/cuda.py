"""The CUDA driver: opened at run time, each failing call a named error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.errors import DeviceError, DriverMissingError
from kvstore.kernel._native import ffi, lib

if TYPE_CHECKING:
    from kvstore.kernel._native import CData

__all__ = ["CudaDevice", "CudaDriver", "CudaEvent"]

_log = logging.getLogger("kvstore")

_LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_MAX_PITCH = (1 << 31) - 1  # devices take no more; what lies further apart is copied run by run
_TEXT = 1024

# What to do about it, by error code. Those from 700 on are faults of what ran on the device, whoever started it.
_ADVICE = {
    1: "check that the pointers are of this device and the streams of this process",
    2: "free memory of the device, raise `ulimit -l`, or lower the budget of the staging buffers",
    3: "the process was forked after the driver had been started: use it in one process only",
    4: "the process is ending: finish or cancel transfers before that",
    100: "check that this process may see a GPU (nvidia-smi, CUDA_VISIBLE_DEVICES, the container's settings)",
    101: "there is no device of that number (CUDA_VISIBLE_DEVICES changes the numbers)",
    400: "check that the stream is one of this process and is still there",
    803: "the driver's library and its kernel module are of different versions: restart the machine or install them anew",
    **dict.fromkeys((700, 702, 709, 710, *range(714, 720)), "the device's context is lost: restart the process"),
}

_drivers: dict[str, CudaDriver] = {}
_guard = threading.Lock()


def _text(text: CData) -> str:
    return ffi.string(text).decode(errors="replace")


class CudaDriver:
    """The driver's library, opened once a process. Use `CudaDriver.load`. Thread-safe.

    Attributes
    ----------
    path : str
        What was opened.
    devices : int
        Devices that this process may use, at least 1.
    """

    def __init__(self, path: str, handle: CData) -> None:
        self.path = path
        self.devices = 0
        self._handle = handle

    @classmethod
    def load(cls, path: str | None = None) -> CudaDriver:
        """Open the driver and start it. The same object for the same path; what failed is tried again by the next call.

        Parameters
        ----------
        path : str, optional
            The library; by default `libcuda.so.1`, found as the system's loader finds libraries.

        Raises
        ------
        DriverMissingError
            There is no such library, it lacks a function, or it has no device.
        DeviceError
            The driver does not start.
        """
        name = path or _LIBRARY
        with _guard:
            if name not in _drivers:
                _drivers[name] = cls._open(name)
            return _drivers[name]

    @classmethod
    def _open(cls, name: str) -> CudaDriver:
        why, incomplete = ffi.new("char[]", _TEXT), ffi.new("int *")
        handle = lib.kvs_cuda_open(name.encode(), why, _TEXT, incomplete)
        if handle == ffi.NULL:
            advice = "install a newer driver (CUDA 11.0 or later)" if incomplete[0] else "install NVIDIA's driver"
            raise DriverMissingError(f"the CUDA driver {name} cannot be used: {_text(why)}; {advice}, or do without a device")
        devices = ffi.new("int *")
        driver = cls(name, handle)
        result = lib.kvs_cuda_init(driver._handle, devices)
        if result & 0xFFFF == 100:
            raise driver.error(result, DriverMissingError)
        driver.check(result)
        driver.devices = devices[0]
        if driver.devices < 1:
            raise DriverMissingError(f"the CUDA driver {name} has no device for this process; {_ADVICE[100]}", code=100)
        return driver

    def device(self, ordinal: int = 0) -> CudaDevice:
        """Open a device: retains its primary context, the one that other libraries in the process use too.

        Raises
        ------
        DeviceError
            There is no such device, or it cannot be used.
        """
        return CudaDevice(self, ordinal)

    def check(self, result: int) -> None:
        """Raise DeviceError for the result of a call unless it is 0."""
        if result:
            raise self.error(result)

    def error(self, result: int, kind: type[DeviceError] = DeviceError) -> DeviceError:
        """The error for the result of a call that failed."""
        call, code = _text(lib.kvs_cuda_call(result)), result & 0xFFFF
        name, text = (_text(f(self._handle, result)) for f in (lib.kvs_cuda_error_name, lib.kvs_cuda_error_text))
        advice = _ADVICE.get(code, "see the system's log for what the driver says")
        return kind(f"{call} failed with {name} ({code}): {text}; {advice}", call=call, code=code, name=name)


class CudaDevice:
    """A device and its primary context, held by whoever uses it; the last holder's `drop` releases it. Thread-safe.

    Each call makes the context current while it runs, and leaves that of the calling thread as it was. Blocking calls release
    the GIL. Streams and events are integers as the driver gives them, so streams of other libraries will do.

    Attributes
    ----------
    driver : CudaDriver
        Its driver.
    ordinal : int
        Its number among the devices that the process sees.
    name : str
        As the driver calls it.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self._d = driver._handle
        device, context, name = ffi.new("int *"), ffi.new("uint64_t *"), ffi.new("char[]", _TEXT)
        driver.check(lib.kvs_cuda_device_open(self._d, ordinal, device, context, name, _TEXT))
        self.name = _text(name)
        self._device, self._context = device[0], context[0]
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Count a holder. Raises DeviceError once the device was released."""
        with self._lock:
            if not self._holders:
                raise DeviceError(f"device {self.ordinal} was released; open it anew")
            self._holders += 1

    def drop(self) -> None:
        """Give a hold back; the last one releases the context."""
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            self.driver.check(lib.kvs_cuda_device_close(self._d, self._device))

    def synchronize(self) -> None:
        """Wait until everything in the context is done. Raises DeviceError."""
        self.driver.check(lib.kvs_cuda_synchronize(self._d, self._context))

    def pin(self, address: int, length: int) -> None:
        """Page-lock host memory, whole pages. It must stay mapped until `unpin`. Raises DeviceError."""
        self.driver.check(lib.kvs_cuda_pin(self._d, self._context, address, length))

    def unpin(self, address: int) -> None:
        """End that. No copy from the memory may be under way. Raises DeviceError."""
        self._end(lib.kvs_cuda_unpin, address)

    def owner(self, pointer: int) -> int | None:
        """The number of the device whose memory a pointer points into; None if it isn't memory of a device."""
        is_device, ordinal = ffi.new("int *"), ffi.new("int *")
        result = lib.kvs_cuda_pointer(self._d, self._context, pointer, is_device, ordinal)
        if result & 0xFFFF == 1:  # the driver doesn't know the pointer
            return None
        self.driver.check(result)
        return ordinal[0] if is_device[0] else None

    def copy(self, stream: int, target: int, source: int, length: int) -> None:
        """Queue a copy of `length` bytes from host memory, which must stay as it is until the copy is done.

        Both sides are trusted. Raises DeviceError.
        """
        self.driver.check(lib.kvs_cuda_copy(self._d, self._context, stream, target, source, length))

    def copy_pitched(self, stream: int, target: int, pitch: int, source: int, width: int, height: int) -> None:
        """Queue a copy of `height` runs of `width` bytes each, dense in host memory, `pitch` bytes apart on the device.

        Otherwise like `copy`.
        """
        if pitch > _MAX_PITCH:
            for row in range(height):
                self.copy(stream, target + row * pitch, source + row * width, width)
            return
        self.driver.check(lib.kvs_cuda_copy_pitched(self._d, self._context, stream, target, pitch, source, width, width, height))

    def create_stream(self) -> int:
        """Make a stream that doesn't wait for the default one. To be ended with `destroy_stream`. Raises DeviceError."""
        stream = ffi.new("uint64_t *")
        result = lib.kvs_cuda_stream_create(self._d, self._context, stream)
        if result and stream[0]:  # made, but then the context could not be left
            lib.kvs_cuda_stream_destroy(self._d, self._context, stream[0])
        self.driver.check(result)
        return stream[0]

    def destroy_stream(self, stream: int) -> None:
        """End a stream, without waiting for what it holds. Raises DeviceError."""
        self._end(lib.kvs_cuda_stream_destroy, stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until everything on a stream is done. Raises DeviceError."""
        self.driver.check(lib.kvs_cuda_stream_synchronize(self._d, self._context, stream))

    def _end(self, call: Callable[[CData, int, int], int], handle: int) -> None:
        """Give something back to the driver; once more if the driver was not even asked, since nobody else will."""
        result = call(self._d, self._context, handle)
        if result and _text(lib.kvs_cuda_call(result)) == "cuCtxPushCurrent_v2":
            _log.warning("tried again to give a device's resource back: %s", self.driver.error(result))
            result = call(self._d, self._context, handle)
        self.driver.check(result)

    def create_event(self) -> CudaEvent:
        """Make an event. Raises DeviceError."""
        event = ffi.new("uint64_t *")
        result = lib.kvs_cuda_event_create(self._d, self._context, event)
        if result and event[0]:
            lib.kvs_cuda_event_destroy(self._d, self._context, event[0])
        self.driver.check(result)
        return CudaEvent(self, event[0])


class CudaEvent:
    """A mark on a stream. Made by `CudaDevice.create_event`, ended by `close`, not while another thread uses it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: CudaDevice, event: int) -> None:
        self._device = device
        self._event = event

    def record(self, stream: int) -> None:
        """Set the mark behind everything that is on the stream now. Raises DeviceError."""
        device = self._device
        device.driver.check(lib.kvs_cuda_event_record(device._d, device._context, self._event, stream))

    def hold_back(self, stream: int) -> None:
        """Let what is queued on a stream from here on wait, on the device, until the mark is reached. Raises DeviceError."""
        device = self._device
        device.driver.check(lib.kvs_cuda_stream_wait(device._d, device._context, stream, self._event))

    def reached(self) -> bool:
        """Whether the mark is reached; true if it was never set. Raises DeviceError."""
        device = self._device
        result = lib.kvs_cuda_event_query(device._d, device._context, self._event)
        if result & 0xFFFF == _NOT_READY:
            return False
        device.driver.check(result)
        return True

    def synchronize(self) -> None:
        """Wait until the mark is reached. Raises DeviceError."""
        device = self._device
        device.driver.check(lib.kvs_cuda_event_synchronize(device._d, device._context, self._event))

    def close(self) -> None:
        """Destroy the event; a second call does nothing. Raises DeviceError."""
        event, self._event = self._event, 0
        if event:
            self._device._end(lib.kvs_cuda_event_destroy, event)
