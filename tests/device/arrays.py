"""Arrays on a pretended device, in all forms in which libraries hand theirs out."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import DeviceArray
from kvstore.layout import Stream
from tests.device.fake import Fake, Memory

__all__ = ["FORMS", "Capsule", "DeviceMemory", "Interface", "Legacy", "Versioned", "in_form"]

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"


class DeviceMemory:
    """An array in a device's memory, seen from the host too.

    Parameters
    ----------
    fake : Fake
        The driver.
    stream : Stream
        Of a layout.
    rows : int
        Along the token axis.
    order : sequence of int, optional
        The axes as they lie in memory, outermost first; C order by default.
    padding : sequence of int, optional
        Elements more than are needed along each axis.
    ordinal : int
        The device.
    """

    def __init__(
        self,
        fake: Fake,
        stream: Stream,
        rows: int,
        *,
        order: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        ordinal: int = 0,
    ) -> None:
        shape = stream.array_shape(rows * stream.tokens_per_row)
        order = tuple(order or range(len(shape)))
        padding = tuple(padding or [0] * len(shape))
        whole = tuple(shape[axis] + padding[axis] for axis in order)
        itemsize = stream.view_dtype.itemsize
        self.memory: Memory = fake.memory(max(1, int(np.prod(whole)) * itemsize), ordinal)
        # what the device sees, as an array of the host
        laid = self.memory.bytes[: int(np.prod(whole)) * itemsize].view(stream.view_dtype).reshape(whole)
        cut = laid[tuple(slice(0, shape[axis]) for axis in order)]
        self.array: npt.NDArray[Any] = np.moveaxis(cut, range(len(shape)), order) if order else cut
        assert self.array.shape == shape
        self.pointer = self.memory.pointer
        self.strides = self.array.strides
        self.shape = shape
        self.itemsize = itemsize
        self.ordinal = ordinal


class Interface:
    """An array as numba and older libraries show theirs."""

    def __init__(self, memory: DeviceMemory, *, stream: int | None = None, readonly: bool = False) -> None:
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": memory.shape,
            "typestr": memory.array.dtype.str,
            "data": (memory.pointer, readonly),
            "strides": memory.strides,
            "version": 3,
            "stream": stream,
        }


class Capsule:
    """What stands behind a DLPack capsule: the structure, by its layout in bytes, and how often it was given back."""

    def __init__(
        self, memory: DeviceMemory, *, versioned: bool, flags: int = 0, bits: int | None = None, kind: int = 2, major: int = 1
    ) -> None:
        self.given_back = 0
        n, item = len(memory.shape), memory.itemsize
        self._shape = (ctypes.c_int64 * n)(*memory.shape)
        self._strides = (ctypes.c_int64 * n)(*(s // item for s in memory.strides))
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        offset = 8 if memory.pointer > 8 else 0  # some libraries use it, and consumers forget it
        tensor = struct.pack(
            "=QiiiBBHQQQ",
            memory.pointer - offset,
            kind,
            memory.ordinal,
            n,
            1,
            8 * item if bits is None else bits,
            1,
            ctypes.addressof(self._shape),
            ctypes.addressof(self._strides),
            offset,
        )
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        header, trailer = struct.pack("=IIQQQ", major, 0, 0, deleter, flags), struct.pack("=QQ", 0, deleter)
        raw = header + tensor if versioned else tensor + trailer
        self._raw = ctypes.create_string_buffer(raw, len(raw))
        self.capsule = _new(ctypes.addressof(self._raw), _VERSIONED if versioned else _LEGACY, None)

    def _delete(self, address: int) -> None:
        assert address == ctypes.addressof(self._raw)
        self.given_back += 1

    @property
    def name(self) -> bytes:
        """The capsule's name now."""
        return _name(self.capsule)  # type: ignore[no-any-return]


class Legacy:
    """An array with DLPack as it was before its structures had versions."""

    versioned = False

    def __init__(self, memory: DeviceMemory, **about: Any) -> None:
        self.memory = memory
        self.about = about
        self.capsules: list[Capsule] = []
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        """Say where it lies."""
        return self.about.get("kind", 2), self.memory.ordinal

    def __dlpack__(self, stream: Any = None) -> Any:
        """Hand a capsule out."""
        self.streams.append(stream)
        self.capsules.append(Capsule(self.memory, versioned=self.versioned, **self.about))
        return self.capsules[-1].capsule


class Versioned(Legacy):
    """An array with DLPack 1.0."""

    versioned = True

    def __dlpack__(  # type: ignore[override]
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None, copy: bool | None = None
    ) -> Any:
        """Hand a capsule out."""
        assert max_version == (1, 0)
        assert copy is False
        return super().__dlpack__(stream)


FORMS = ("raw", "interface", "legacy", "versioned")


def in_form(memory: DeviceMemory, form: str) -> Any:
    """Hand an array out in one of FORMS."""
    if form == "raw":
        return DeviceArray(memory.pointer, memory.shape, memory.itemsize, memory.strides)
    return {"interface": Interface, "legacy": Legacy, "versioned": Versioned}[form](memory)
