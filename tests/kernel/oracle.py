"""What the kernel must do, in plain numpy, and memory to do it in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernel import Rows, crc32c, payload_bytes

GUARD = 0xA5


@dataclass
class Stream:
    """An engine array, and how its rows are found."""

    array: NDArray[Any]
    axis: int
    tokens_per_row: int = 1
    slots: NDArray[Any] | None = None

    def rows(self) -> Rows:
        """Return what the kernel is given."""
        if self.slots is None:
            return Rows.strided(self.array, axis=self.axis, tokens_per_row=self.tokens_per_row)
        return Rows.paged(self.array, self.slots, axis=self.axis, tokens_per_row=self.tokens_per_row)

    def index(self, first: int, tokens: int) -> tuple[Any, ...]:
        """Return the numpy index of the rows of tokens [first, first + tokens), outer axes in front."""
        span = slice(first // self.tokens_per_row, first // self.tokens_per_row + tokens // self.tokens_per_row)
        before = (slice(None),) * self.axis
        if self.slots is None:
            return (*before, span)
        return (*before, *np.divmod(self.slots[span], self.array.shape[self.axis + 1]))

    def segment(self, first: int, tokens: int) -> bytes:
        """Return what the segment of these tokens must hold."""
        return np.ascontiguousarray(self.array[self.index(first, tokens)]).tobytes()


class Payloads:
    """Payload buffers between guard bytes, at chosen distances from an aligned start."""

    def __init__(self, rows: Sequence[Rows], tokens: NDArray[np.int64], shift: int = 0) -> None:
        sizes = [payload_bytes(rows, int(t)) for t in tokens]
        self._buffers = [np.full(size + 256, GUARD, np.uint8) for size in sizes]
        self.views = []
        for buffer, size in zip(self._buffers, sizes, strict=True):
            start = -buffer.ctypes.data % 64 + 64 + shift
            self.views.append(buffer[start : start + size])
        self.addresses = np.array([v.ctypes.data for v in self.views], np.uint64)

    def check_guards(self) -> None:
        """Fail if anything beside the payloads was written."""
        for buffer, view in zip(self._buffers, self.views, strict=True):
            start = view.ctypes.data - buffer.ctypes.data
            assert (buffer[:start] == GUARD).all()
            assert (buffer[start + view.size :] == GUARD).all()


def expected_payload(streams: Sequence[Stream], first: int, tokens: int) -> tuple[bytes, list[int]]:
    """Return a payload and the checksums of its segments."""
    segments = [s.segment(first, tokens) for s in streams]
    return b"".join(s + bytes(-len(s) % 64) for s in segments), [crc32c(s) for s in segments]
