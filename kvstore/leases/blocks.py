"""The blocks of a lease, and a stream's rows in them, as arrays on the map that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array
from kvstore.layout import Layout, Stream
from kvstore.leases.located import Located
from kvstore.leases.pin import Pin

if TYPE_CHECKING:
    from kvstore.leases.lease import Lease

__all__ = ["Blocks", "LeasedBlock", "Views"]


class _Geometry:
    """How a stream's rows lie in a block that holds `held` positions, of which `used` are wanted."""

    __slots__ = ("dtype", "segment", "shape", "strides")

    def __init__(self, layout: Layout, index: int, stream: Stream, held: int, used: int) -> None:
        self.dtype = stream.view_dtype
        self.segment = layout.segments(held)[index]
        self.shape = stream.array_shape(used)
        strides = [self.dtype.itemsize]
        for extent in reversed(stream.array_shape(held)[1:]):
            strides.append(strides[-1] * extent)
        self.strides = tuple(reversed(strides))

    def view(self, whole: npt.NDArray[np.uint8], payload: int) -> Array:
        """The rows in a block whose payload lies at this offset of the map. `whole` lives as long as the array does.

        Made in one step: slicing the map, a view of another type, a shape and a slice of that took four times as long.
        """
        return np.ndarray(self.shape, self.dtype, whole, payload + self.segment, self.strides)


class Views(Sequence[Array]):
    """A stream's rows, one read-only array for each block, each made when asked for. Holds the pin as long as it lives.

    It has no reference to the lease. Thread-safe.

    Parameters
    ----------
    layout : Layout
        The streams.
    index : int
        Which of them.
    pin : Pin
        What keeps the bytes in place.
    located : Located
        The lease's blocks.
    """

    __slots__ = ("_last", "_offsets", "_usual", "_whole")

    def __init__(self, layout: Layout, index: int, pin: Pin, located: Located) -> None:
        stream = layout.streams[index]
        self._offsets = located.offset
        if len(located):
            tokens = layout.block_tokens
            self._whole = pin.whole()
            self._usual = _Geometry(layout, index, stream, tokens, tokens)
            self._last = _Geometry(layout, index, stream, int(located.held[-1]), int(located.used[-1]))

    def __len__(self) -> int:
        return self._offsets.size

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = range(len(self))[index]
        geometry = self._last if at == len(self) - 1 else self._usual
        return geometry.view(self._whole, int(self._offsets[at]))

    def __iter__(self) -> Iterator[Array]:
        if not len(self):
            return
        view, whole = self._usual.view, self._whole
        for payload in self._offsets[:-1].tolist():
            yield view(whole, payload)
        yield self[-1]

    def __repr__(self) -> str:
        return f"<{len(self)} views of a stream's rows>"


class LeasedBlock:
    """One block of a lease. Its arrays are made when asked for.

    Attributes
    ----------
    file_offset : int
        Offset of the payload in the data file, a multiple of 4 KiB.
    payload_bytes : int
        Length of the payload.
    """

    __slots__ = ("_index", "_lease", "_located", "file_offset", "payload_bytes")

    def __init__(self, lease: Lease, located: Located, index: int, file_offset: int, payload_bytes: int) -> None:
        self._lease = lease
        self._located = located
        self._index = index
        self.file_offset = file_offset
        self.payload_bytes = payload_bytes

    @property
    def block_id(self) -> bytes:
        """32 bytes."""
        return self._located.ids[self._index]

    @property
    def start(self) -> int:
        """Position of its first row."""
        return int(self._located.start[self._index])

    @property
    def tokens(self) -> int:
        """Positions of it that belong to the lease."""
        return int(self._located.used[self._index])

    @property
    def held_tokens(self) -> int:
        """Positions that it holds rows for; more than `tokens` where the lease ends inside it."""
        return int(self._located.held[self._index])

    @property
    def sums(self) -> npt.NDArray[np.uint32]:
        """CRC32C of each stream's segment: uint32."""
        found: npt.NDArray[np.uint32] = self._located.sums[self._index]
        return found

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        """The payload on the map: read-only, not copied, not validated (see `Lease.validate`).

        Stays valid as long as it lives, after the lease too. Reading a page that the disk cannot deliver, or that was
        truncated away meanwhile, kills the process: copy instead where that matters.
        """
        return self._lease._open().view(self.file_offset, self.payload_bytes)

    def stream(self, name: str) -> Array:
        """The block's rows of one stream that belong to the lease: a read-only view, as `payload`."""
        whole = self._lease._open().whole()
        index, stream = self._lease._stream(name)
        geometry = _Geometry(self._lease._scope.layout, index, stream, self.held_tokens, self.tokens)
        return geometry.view(whole, self.file_offset)


class Blocks(Sequence[LeasedBlock]):
    """The blocks of a lease, each made when asked for: who wants one of hundreds pays for one. Keeps the lease alive."""

    __slots__ = ("_lease", "_lengths", "_located", "_offsets")

    def __init__(self, lease: Lease, located: Located) -> None:
        self._lease = lease
        self._located = located
        self._offsets: list[int] = located.offset.tolist()  # all at once: a numpy scalar for each costs more than its block
        self._lengths: list[int] = located.payload_bytes.tolist()

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> LeasedBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LeasedBlock]: ...
    def __getitem__(self, index: int | slice) -> LeasedBlock | Sequence[LeasedBlock]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        at = range(len(self))[index]
        return LeasedBlock(self._lease, self._located, at, self._offsets[at], self._lengths[at])

    def __iter__(self) -> Iterator[LeasedBlock]:
        every = range(len(self))
        return map(LeasedBlock, repeat(self._lease), repeat(self._located), every, self._offsets, self._lengths)
