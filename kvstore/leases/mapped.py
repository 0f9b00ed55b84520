"""A lease's blocks as one run of memory, made of their own file pages: no copy, and shared between processes."""

from __future__ import annotations

import errno
import mmap
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, rows_of
from kvstore.errors import ArrayError, BlockDamaged, LeaseClosedError, MappingError, ViewsAliveError
from kvstore.kernel import Rows, Window
from kvstore.layout import Stream
from kvstore.leases.fill import Filler
from kvstore.leases.located import Located
from kvstore.leases.pin import Pin
from kvstore.leases.region import Region
from kvstore.scope import NamespaceScope

__all__ = ["Mapped", "map_blocks"]

_LIMITS = (errno.ENOMEM, errno.EAGAIN)


class Mapped:
    """The rows of a lease as one writeable run of memory in pages of equal size, one for each block. Made by `Lease.map`.

    Page k begins at ``k * stride`` and holds the rows of block k as a full block of the layout lies in the store: stream by
    stream in layout order, each at the next multiple of 64, in the engine's own axis order. Behind the last stream are zeros.

    - Whole blocks are the store's own file pages: not copied, and shared through the page cache with every process that maps
      them. **Only their headers were checked, as with views**; call `Lease.validate` before the lease ends to check the bytes.
    - Where the lease ends inside a block, the last page is a copy of the rows that belong to it, which are checked as they are
      copied, and zeros in place of the others. So no row of another session is in it.

    Writing is private: a page that is written to is copied by the system first, and neither the store nor another process sees it.

    It outlives the lease and the store's handle. Until it is detached, or it and all arrays made from it have gone, it holds the
    lease's transaction, which keeps every page from reuse that is freed meanwhile: detach what is to live long. Until then, too,
    a page that the disk can't deliver is SIGBUS for who touches it, and if somebody truncates the data file every page behind its
    end is, those that were written to as well: where that must not be, copy with `Lease.copy_into`. A forked child may read it
    until this process detaches it or lets it go.

    Its methods may be called from any thread, one at a time; its arrays are anybody's. Use it in a `with` block, or just drop
    it: the memory goes with the last array.

    Attributes
    ----------
    length : int
        Token positions that it holds rows for.
    blocks : int
        How many pages it has.
    stride : int
        Bytes from one page to the next: the payload of a full block, rounded up to the system's page size.
    """

    def __init__(self, scope: NamespaceScope, pin: Pin, located: Located, filler: Filler, *, page_bytes: int) -> None:
        self._region: Region | None = None
        layout = scope.layout
        self._block_tokens = layout.block_tokens
        self._segments = layout.segments(layout.block_tokens)
        self._streams = {stream.name: (start, stream) for start, stream in zip(self._segments, layout.streams, strict=False)}
        self._located = located
        self._filler: Filler | None = filler  # to refuse a block that a detach can't read
        self.length = int(located.used.sum())
        self.blocks = len(located)
        self.stride = -(-self._segments[-1] // page_bytes) * page_bytes
        whole = (located.used == self._block_tokens) & (located.held == self._block_tokens)
        self._whole = self.blocks if whole.all() else int(np.argmin(whole))
        # before anything is mapped: where that fails, nothing is to be undone
        parts = [(index, self._checked_part(index)) for index in range(self._whole, self.blocks)]
        self._region = Region(self._window(scope, page_bytes), pin)
        for index, part in parts:
            self.block(index)[:] = part

    def _checked_part(self, index: int) -> npt.NDArray[np.uint8]:
        """A page with the rows of a block that belong to the lease, checked, and zeros in place of the others."""
        page = np.zeros(self._segments[-1], np.uint8)
        used = int(self._located.used[index])
        rows = []
        for start, stream in self._streams.values():
            if stream.rows(used):
                rows.append(rows_of(stream, self._rows(page[start:], stream)))
            else:
                rows.append(Rows.skip(row_bytes=stream.row_bytes, tokens_per_row=stream.tokens_per_row))
        assert self._filler is not None
        self._filler.rows(rows, blocks=slice(index, index + 1))
        return page

    def _rows(self, segment: npt.NDArray[np.uint8], stream: Stream) -> Array:
        """The rows of a full block of a stream, at the beginning of some bytes."""
        whole = segment[: stream.rows(self._block_tokens) * stream.row_bytes]
        return whole.view(stream.view_dtype).reshape(stream.array_shape(self._block_tokens))

    def _window(self, scope: NamespaceScope, page_bytes: int) -> Window:
        offsets = self._located.offset[: self._whole if self.stride else 0]
        if (offsets % page_bytes).any():
            raise MappingError(
                f"this system's pages are of {page_bytes} bytes, and payloads in a store begin at multiples of 4096: its blocks "
                "can't be mapped side by side here; copy with lease.copy_into, or use views"
            )
        try:
            return scope.store.environment.window(offsets.astype(np.uint64), self.stride, self.blocks * self.stride)
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in _LIMITS:
                why += f"; it takes {self._whole} maps of the process (vm.max_map_count) and address space (ulimit -v)"
            raise MappingError(
                f"{self.blocks} blocks of {self.stride} bytes can't be mapped side by side: {why}; raise that limit, or copy with "
                "lease.copy_into"
            ) from error

    def __enter__(self) -> Mapped:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def __del__(self) -> None:
        if getattr(self, "_region", None) is not None:
            self._end()

    def _open(self) -> Region:
        region = self._region
        if region is None:
            raise LeaseClosedError("the mapped buffer is closed; map it anew with lease.map()")
        return region

    def _end(self) -> None:
        region, self._region = self._region, None
        self._filler = None
        if region is not None:
            region.drop()

    def close(self) -> None:
        """Unmap it now. Idempotent.

        Raises
        ------
        ViewsAliveError
            When arrays made from it are still alive; nothing is closed then. (Leaving the `with` block does not raise: it is
            unmapped with the last array.)
        """
        region = self._region
        if region is not None and region.arrays:
            raise ViewsAliveError(
                f"{region.arrays} arrays of the mapped buffer are alive; delete them first, or let it go with them"
            )
        self._end()

    @property
    def detached(self) -> bool:
        """Whether it is a copy of its own by now, and pins nothing."""
        return self._open().detached

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it: writeable, contiguous, shape (blocks * stride,). Keeps the memory as long as it, or a part of it, lives."""
        return self._open().bytes(0, self.blocks * self.stride)

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        """One page without what rounds it up: shape (payload bytes of a full block,), writeable.

        Raises
        ------
        IndexError
        """
        return self._open().bytes(self._at(index) * self.stride, self._segments[-1])

    def stream(self, name: str, index: int) -> Array:
        """The rows of one stream in one page that belong to the lease, writeable, in the stream's shape and view dtype.

        Raises
        ------
        ArrayError
            When the layout has no such stream.
        IndexError
        """
        start, stream = self._stream(name)
        at = self._at(index)
        array = self._rows(self.block(at)[start:], stream)
        return array[(slice(None),) * stream.token_axis + (slice(0, stream.rows(int(self._located.used[at]))),)]

    def stream_pages(self, name: str) -> Array:
        """One stream in all pages as one writeable array of shape (blocks, *shape of a full block's rows).

        The first axis has `stride` bytes between its elements; each of them is contiguous. Missing rows of the last page are zeros:
        position p is row ``p % block_tokens // tokens_per_row`` of page ``p // block_tokens``.

        Raises
        ------
        ArrayError
            When the layout has no such stream.
        """
        start, stream = self._stream(name)
        pages = self.array.reshape(self.blocks, self.stride)[:, start : start + stream.rows(self._block_tokens) * stream.row_bytes]
        return pages.view(stream.view_dtype).reshape(self.blocks, *stream.array_shape(self._block_tokens))

    def detach(self, *, threads: int | None = None) -> None:
        """Replace it, in place, by a copy of its own, and end what it holds of the store. A second call does nothing.

        Arrays that were made before stay valid, at the same addresses, and show the same bytes, the caller's writes included. Other
        threads may read them meanwhile; **nobody may write to them until it returns**: such a write may be lost. A save can use the
        freed pages at once. It takes memory for all of it, and reads what isn't in the page cache.

        Parameters
        ----------
        threads : int, optional
            Threads to copy with, 1 to 64; by default one for each processor, at most 8. The GIL is released.

        Raises
        ------
        ValueError
            Another number of threads.
        BlockDamaged
            When a block's bytes can't be read. It is refused from now on; the buffer is as it was, and not detached.
        MappingError
            When there is no memory for the copy; likewise.
        LeaseClosedError
            When it is closed.
        """
        region = self._open()
        try:
            region.detach(threads)
        except OSError as error:
            raise self._failed(region, error) from error
        self._filler = None  # and with it all that is left of the store

    def _failed(self, region: Region, error: OSError) -> BlockDamaged | MappingError:
        """The error for a copy that failed, naming the block that can't be read if it is one."""
        if error.errno not in _LIMITS and self._filler is not None:
            for index in range(self._whole):
                try:
                    region.window.populate(index * self.stride, self.stride)
                except OSError as why:
                    return self._filler.damaged(self._located, index, f"its bytes can't be read: {why.strerror}")
        return MappingError(f"{error.strerror}; the buffer is as it was: free memory, or let it go and copy less at a time")

    def _at(self, index: int) -> int:
        try:
            return range(self.blocks)[index]
        except IndexError:
            raise IndexError(f"the mapped buffer has {self.blocks} blocks, there is none of index {index}") from None

    def _stream(self, name: str) -> tuple[int, Stream]:
        try:
            return self._streams[name]
        except KeyError:
            raise ArrayError(f"the layout has no stream {name!r}; it has {list(self._streams)}") from None


def map_blocks(scope: NamespaceScope, pin: Pin, located: Located, filler: Filler, *, page_bytes: int = mmap.PAGESIZE) -> Mapped:
    """Map the blocks of a lease. The result holds the pin for as long as it needs it.

    Parameters
    ----------
    page_bytes : int
        The system's page size.

    Raises
    ------
    MappingError, BlockDamaged, LeaseClosedError
        As `Lease.map`; nothing is left mapped.
    """
    pin.hold()  # the bytes stay in place meanwhile, whatever ends the lease
    try:
        return Mapped(scope, pin, located, filler, page_bytes=page_bytes)
    finally:
        pin.drop()
