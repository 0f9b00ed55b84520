"""Tensors as numpy sees them: the same memory, the same bits, under the label that a layout knows them by."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.arrays import Array
from kvstore.errors import LayoutError
from kvstore.layout import dtype_of

__all__ = ["label_of", "tensor_of", "view_of"]

_LABELS: dict[Any, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e5m2: "f8_e5m2",
    torch.float8_e4m3fnuz: "f8_e4m3fnuz",
    torch.float8_e5m2fnuz: "f8_e5m2fnuz",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}

# torch's integers in which it hands numpy the bits of what numpy has no dtype for
_BITS: dict[str, tuple[Any, str]] = {
    "bf16": (torch.int16, "<i2"),
    "f8_e4m3": (torch.uint8, "u1"),
    "f8_e5m2": (torch.uint8, "u1"),
    "f8_e4m3fnuz": (torch.uint8, "u1"),
    "f8_e5m2fnuz": (torch.uint8, "u1"),
}


def label_of(dtype: torch.dtype) -> str:
    """Name a torch dtype as layouts do.

    Raises
    ------
    LayoutError
        When no label stands for it.
    """
    try:
        return _LABELS[dtype]
    except KeyError:
        raise LayoutError(f"the cache holds tensors of {dtype}; known are {', '.join(map(str, _LABELS))}") from None


def view_of(tensor: torch.Tensor) -> Array:
    """View a tensor's memory as its label's numpy dtype: no copy, any strides, writes go to the tensor.

    A tensor of another device is copied to the host first, which waits for what was queued on it: then the array is a copy.
    """
    label = label_of(tensor.dtype)
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.to("cpu")
    if label in _BITS:
        plain = plain.view(_BITS[label][0])
    array: Array = plain.numpy()
    return array.view(dtype_of(label).view)


def tensor_of(array: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """View an array's memory as a tensor: no copy on the CPU; on another device a copy that is complete when this returns."""
    label = label_of(dtype)
    if label in _BITS:
        bits = torch.from_numpy(array.view(_BITS[label][1]))
        return bits.view(dtype).to(device)
    return torch.from_numpy(array).to(device)
