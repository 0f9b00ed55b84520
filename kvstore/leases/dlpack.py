"""DLPack capsules: what they say about an array on a device, and giving them back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CUDA", "Tensor", "consume"]

CUDA = 2  # kDLCUDA
_READ_ONLY, _IS_COPY = 1, 2  # flags of a versioned tensor


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# prototypes of our own: those that `ctypes.pythonapi` hands out are shared with everybody
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# a capsule keeps the address of its name, so these live as long as the module
_NAME, _USED = b"dltensor", b"used_dltensor"
_VERSIONED_NAME, _VERSIONED_USED = b"dltensor_versioned", b"used_dltensor_versioned"


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a capsule described. The memory is the producer's, and stays until `release` is called, once.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    device_type, device_id : int
        Where it lies.
    shape : tuple of int
        In elements.
    strides : tuple of int or None
        In bytes; None for an array in C order.
    itemsize : int
        Bytes of an element.
    readonly : bool
        Whether it may not be written.
    release : callable
        Tells the producer that the memory isn't needed any more.
    """

    pointer: int
    device_type: int
    device_id: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    itemsize: int
    readonly: bool
    release: Callable[[], None]


def consume(array: Any, stream: int | None) -> Tensor:
    """Ask an object for its DLPack capsule and take what is in it.

    Parameters
    ----------
    array : object
        Has `__dlpack__`.
    stream : int
        The CUDA stream that the memory will be used on. The producer lets it wait for what it has still to do.

    Raises
    ------
    ValueError
        The capsule is of a kind or version that isn't known, is a copy, or its elements aren't whole bytes. It has been given
        back then. Whatever the object itself raises comes through.
    """
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0), copy=False)
    except TypeError:  # from before these arguments
        capsule = array.__dlpack__(stream=stream)
    if _is_valid(capsule, _VERSIONED_NAME):
        address = _get_pointer(capsule, _VERSIONED_NAME)
        versioned = _Versioned.from_address(address)
        _set_name(capsule, _VERSIONED_USED)
        release = _releaser(versioned.deleter, address)
        if versioned.major != 1:
            refused = f"its DLPack version is {versioned.major}.{versioned.minor}, known is 1"
            release()  # from here on what was read is gone
            raise ValueError(refused)
        tensor, flags = versioned.tensor, versioned.flags
    elif _is_valid(capsule, _NAME):
        address = _get_pointer(capsule, _NAME)
        managed = _Managed.from_address(address)
        _set_name(capsule, _USED)
        release = _releaser(managed.deleter, address)
        tensor, flags = managed.tensor, 0
    else:
        raise ValueError(f"what it gives as a DLPack capsule is {capsule!r}, or one that was used before")
    bits = tensor.bits * tensor.lanes
    if bits % 8 or not bits or flags & _IS_COPY:
        refused = f"its elements are of {tensor.bits} bits x {tensor.lanes}; view it as whole bytes"
        if flags & _IS_COPY:
            refused = "what it gives through DLPack is a copy: writing to that would change nothing"
        release()
        raise ValueError(refused)
    itemsize = bits // 8
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(n * itemsize for n in tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Tensor(pointer, tensor.device_type, tensor.device_id, shape, strides, itemsize, bool(flags & _READ_ONLY), release)


def _releaser(deleter: int | None, address: int) -> Callable[[], None]:
    def release() -> None:
        if deleter:
            _deleter(deleter)(address)

    return release
