"""The driver for tests, built from fake_cuda.c, and arrays in the memory of its devices."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CALLS", "Fake", "Memory", "build"]

SOURCE = Path(__file__).with_name("fake_cuda.c")
FILL = 0xA5
CONTEXTS, STREAMS, EVENTS, PINNED, QUEUED = range(5)
PLAIN, PITCHED, PAGEABLE, HELD_BACK = range(4)

# every call that a transfer makes, and those that go before it
CALLS = (
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
)


def build(folder: Path, name: str = "libcuda.so.1", *options: str) -> Path:
    """Compile the driver into a folder."""
    path = folder / name
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options]
    subprocess.run([*command, "-o", str(path), str(SOURCE), "-pthread"], check=True)
    return path


class Memory:
    """An array of bytes of a device, also seen from the host."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer = pointer
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        self.bytes[:] = FILL


class Fake:
    """The driver's own face for tests."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        self._lib.fake_alloc.restype = self._lib.fake_asked.restype = ctypes.c_uint64
        self._lib.fake_alloc.argtypes = (ctypes.c_size_t, ctypes.c_int)
        self._lib.fake_free.argtypes = (ctypes.c_uint64,)
        self._lib.fake_complaints.restype = ctypes.c_char_p
        self._lib.fake_current.restype = ctypes.c_void_p

    def reset(self) -> None:
        """Forget everything."""
        self._lib.fake_reset()

    def memory(self, size: int, ordinal: int = 0) -> Memory:
        """Allocate memory of a device; every byte is FILL."""
        return Memory(self._lib.fake_alloc(size, ordinal), size)

    def free(self, memory: Memory) -> None:
        """Free it."""
        self._lib.fake_free(memory.pointer)

    def devices(self, count: int) -> None:
        """Say how many devices there are."""
        self._lib.fake_devices(count)

    def fail(self, call: str, nth: int = 1, code: int = 999, *, for_good: bool = False) -> None:
        """Let a call ("*": any) fail at its nth time from here on; for good: from then on."""
        self._lib.fake_fail(call.encode(), nth, code, int(for_good))

    def calls(self, name: str) -> int:
        """How often a call was made."""
        return int(self._lib.fake_calls(name.encode()))

    def run_late(self, microseconds: int = 0, *, allowed: int = -1) -> None:
        """Run what is queued on a thread, each op after a delay, and so many ops only (any number if negative)."""
        self.allow(allowed)
        self._lib.fake_run_late(microseconds)

    def allow(self, ops: int) -> None:
        """Let the thread run so many ops more."""
        self._lib.fake_allow(ops)

    def live(self, what: int) -> int:
        """How many things of a kind there are: CONTEXTS, STREAMS, EVENTS, PINNED, QUEUED."""
        return int(self._lib.fake_live(what))

    def asked(self, what: int) -> int:
        """How often something was asked for: PLAIN, PITCHED, PAGEABLE copies, HELD_BACK streams."""
        return int(self._lib.fake_asked(what))

    def current(self) -> Any:
        """The current context of this thread."""
        return self._lib.fake_current()

    def complaints(self) -> list[str]:
        """What real hardware would not have complained of."""
        return self._lib.fake_complaints().decode().splitlines()  # type: ignore[no-any-return]

    def assert_clean(self) -> None:
        """Require that nothing is left over and nothing was wrong."""
        assert self.complaints() == [], self.complaints()
        live = {what: self.live(number) for number, what in enumerate(("contexts", "streams", "events", "pinned", "queued"))}
        assert not any(live.values()), live
