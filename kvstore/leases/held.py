"""Bytes that stay where they are as long as an array made of them lives."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["held_bytes"]


class _Holdable(Protocol):
    def hold(self) -> None: ...
    def drop(self) -> None: ...


class _HeldBytes:
    """A run of bytes as numpy's array interface. An array made from it keeps it alive, and it keeps a hold on their owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: _Holdable, address: int, length: int, read_only: bool) -> None:
        owner.hold()
        self._owner = owner
        self.__array_interface__: dict[str, Any] = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, read_only),
            "version": 3,
        }

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)  # not there when the owner refused to be held
        if owner is not None:
            owner.drop()


def held_bytes(owner: _Holdable, address: int, length: int, *, read_only: bool) -> npt.NDArray[np.uint8]:
    """Make an array of `length` bytes at an address, which holds their owner until it and everything made from it are gone."""
    return np.asarray(_HeldBytes(owner, address, length, read_only))
