"""Arrays on a device: in which forms they may come, what is checked of them, and the copies that fill them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.errors import ArrayError
from kvstore.kernel import CudaDevice, Rows
from kvstore.layout import Stream
from kvstore.leases import dlpack

__all__ = ["Destination", "DeviceArray", "Piece"]


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in a device's memory, by its address.

    Attributes
    ----------
    pointer : int
        Address on the device of the first element.
    shape : tuple of int
        In elements.
    itemsize : int
        Bytes of an element.
    strides : tuple of int, optional
        In bytes, as numpy's; by default those of an array in C order.
    readonly : bool
        Whether it may not be written.
    stream : int, optional
        A CUDA stream whose work so far has to be done before the array is written.
    owner : object
        Kept alive until the transfer is over.
    """

    pointer: int
    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] | None = None
    readonly: bool = False
    stream: int | None = None
    owner: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy: `height` runs of `width` bytes, dense in host memory from `source` on, `pitch` bytes apart from `target` on."""

    target: int
    pitch: int
    source: int
    width: int
    height: int


class _Shell:
    """The geometry of device memory as numpy sees arrays. What is made of it must never be read."""

    def __init__(self, array: DeviceArray) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (array.pointer, array.readonly),
            "version": 3,
        }


class Destination:
    """Where a stream's rows go on a device, checked against the stream. Immutable but for `release`.

    Parameters
    ----------
    stream : Stream
        Which stream of the layout.
    given : object
        A DeviceArray, or an object with `__dlpack__` or `__cuda_array_interface__`.
    tokens : int
        Positions whose rows have to fit.
    device : CudaDevice
        The device that it has to lie on.
    on : int
        The CUDA stream that will write it.

    Attributes
    ----------
    stream : Stream
        The stream.
    rows : Rows or None
        The rows to be written as the kernel describes them, for checks that never touch the memory; None if there are none.
    after : int or None
        A CUDA stream whose work so far has to be done before.

    Raises
    ------
    ArrayError
        Says by name what doesn't fit.
    DeviceError
        The driver could not be asked about the memory.
    """

    def __init__(self, stream: Stream, given: object, tokens: int, device: CudaDevice, on: int) -> None:
        self.stream = stream
        self._release: Callable[[], None] | None = None
        try:
            array = self._described(given, device, on)
            self.after = array.stream
            self._owner = (given, array.owner)
            self._check(array, stream, tokens, device)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the memory back to who lent it. Nobody may use it any more. A second call does nothing."""
        release, self._release = self._release, None
        self._owner = (None, None)
        if release is not None:
            release()

    def _described(self, given: object, device: CudaDevice, on: int) -> DeviceArray:
        if isinstance(given, DeviceArray):
            return given
        kind = type(given).__name__
        if hasattr(given, "__dlpack__") and hasattr(given, "__dlpack_device__"):
            place = tuple(int(n) for n in given.__dlpack_device__())
            if place[0] != dlpack.CUDA:
                raise self._refused(
                    f"the {kind} is not in a CUDA device's memory (DLPack device {place}); use copy_into for the host"
                )
            try:
                tensor = dlpack.consume(given, on)
            except (BufferError, TypeError, ValueError, RuntimeError) as error:
                if not hasattr(given, "__cuda_array_interface__"):
                    raise self._refused(f"the {kind} cannot be had through DLPack: {error}") from error
            else:
                self._release = tensor.release
                if (tensor.device_type, tensor.device_id) != (dlpack.CUDA, device.ordinal):
                    raise self._refused(f"the {kind} is on device {tensor.device_id}, the staging buffers on {device.ordinal}")
                return DeviceArray(tensor.pointer, tensor.shape, tensor.itemsize, tensor.strides, tensor.readonly)
        interface = getattr(given, "__cuda_array_interface__", None)
        if not isinstance(interface, dict):
            raise self._refused(f"a {kind} is none of DeviceArray, an object with DLPack, one with __cuda_array_interface__")
        if interface.get("mask") is not None:
            raise self._refused("masked arrays cannot be filled")
        pointer, readonly = interface["data"]
        strides = interface.get("strides")
        return DeviceArray(
            pointer=int(pointer),
            shape=tuple(int(n) for n in interface["shape"]),
            itemsize=np.dtype(interface["typestr"]).itemsize,
            strides=None if strides is None else tuple(int(n) for n in strides),
            readonly=bool(readonly),
            stream=interface.get("stream"),
        )

    def _check(self, array: DeviceArray, stream: Stream, tokens: int, device: CudaDevice) -> None:
        expected, axis = stream.array_shape(tokens), stream.token_axis
        itemsize = stream.view_dtype.itemsize
        if array.itemsize != itemsize:
            raise self._refused(f"expected elements of {itemsize} bytes for dtype {stream.dtype}, got {array.itemsize}")
        if len(array.shape) != len(expected) or any(
            got < want if i == axis else got != want for i, (got, want) in enumerate(zip(array.shape, expected, strict=True))
        ):
            raise self._refused(
                f"expected shape {expected} or longer along the token axis ({axis}) for {tokens} tokens, got {array.shape}"
            )
        if array.strides is not None and len(array.strides) != len(array.shape):
            raise self._refused(f"{len(array.strides)} strides for {len(array.shape)} axes")
        if array.readonly:
            raise self._refused("the destination is read-only")
        self.rows: Rows | None = None
        if not stream.rows(tokens):
            return
        if array.pointer <= 0:
            raise self._refused(f"{array.pointer} is no address")
        shell = np.asarray(_Shell(array))[(slice(None),) * axis + (slice(0, stream.rows(tokens)),)]
        self.rows = Rows.strided(shell, axis=axis, tokens_per_row=stream.tokens_per_row)
        self._geometry(shell, axis)
        last = array.pointer + sum((n - 1) * stride for n, stride in zip(shell.shape, shell.strides, strict=True)) + itemsize - 1
        for pointer in (array.pointer, last):
            owner = device.owner(pointer)
            if owner != device.ordinal:
                where = "no memory of a CUDA device" if owner is None else f"memory of device {owner}"
                raise self._refused(f"address {pointer:#x} is {where}, the staging buffers are for device {device.ordinal}")

    def _geometry(self, shell: np.ndarray[Any, np.dtype[Any]], axis: int) -> None:
        """Take the places of rows from the strides: what lies before the token axis, rows, and the dense line of a row."""
        line = shell.itemsize
        for n, stride in reversed(list(zip(shell.shape[axis + 1 :], shell.strides[axis + 1 :], strict=True))):
            if n > 1 and stride != line:
                raise self._refused(
                    f"what lies behind the token axis ({axis}) must be contiguous, got shape {shell.shape}, strides {shell.strides}"
                )
            line *= n
        used = [s for n, s in zip(shell.shape[: axis + 1], shell.strides[: axis + 1], strict=True) if n > 1]
        if any(stride < line for stride in used):
            raise self._refused(f"strides have to be positive and rows apart, got shape {shell.shape} and strides {shell.strides}")
        self._base: int = shell.__array_interface__["data"][0]
        self._line = line
        self._row_stride = shell.strides[axis]
        self._outer = tuple(zip(shell.shape[:axis], shell.strides[:axis], strict=True))

    def pieces(self, first: int, rows: int) -> Iterator[Piece]:
        """The copies that bring `rows` rows from row `first` on, which lie in host memory as a C-contiguous array, to their place.

        `Piece.source` counts from the beginning of that array. One copy where all is contiguous, one pitched copy where one
        axis remains, as for heads that each keep their tokens together, else one for each place of the axes before.
        """
        axes = [(n, stride) for n, stride in (*self._outer, (rows, self._row_stride)) if n != 1]
        width = self._line
        while axes and axes[-1][1] == width:
            width *= axes.pop()[0]
        joined: list[tuple[int, int]] = []
        for n, stride in axes:
            if joined and joined[-1][1] == n * stride:
                joined[-1] = (joined[-1][0] * n, stride)
            else:
                joined.append((n, stride))
        height, pitch = joined.pop() if joined else (1, width)
        start = self._base + first * self._row_stride
        for count, place in enumerate(itertools.product(*(range(n) for n, _ in joined))):
            target = start + sum(i * stride for i, (_, stride) in zip(place, joined, strict=True))
            yield Piece(target, pitch, count * width * height, width, height)

    def _refused(self, why: str) -> ArrayError:
        return ArrayError(f"stream {self.stream.name!r}: {why}")
