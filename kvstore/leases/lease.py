"""A lease: match and pin in one step, and the ways to get at the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from types import TracebackType
from typing import overload

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, StreamArray, check_named, check_rows, rows_of, writeable
from kvstore.errors import ArrayError, BlockDamaged, IndexDamaged, LeaseClosedError, ViewsAliveError
from kvstore.ids import TokenArray, token_bytes
from kvstore.kernel import Rows
from kvstore.layout import Stream
from kvstore.leases.device import DeviceTransfer, start_device_copy
from kvstore.leases.fill import Filler
from kvstore.leases.located import Located, locate_rows, locate_states
from kvstore.leases.mapped import Mapped, map_blocks
from kvstore.leases.match import Found, find_prefix
from kvstore.leases.pin import Pin
from kvstore.leases.transfer import Source, Transfer, start_copy
from kvstore.records.states import unpack_states
from kvstore.scope import NamespaceScope
from kvstore.staging import Staging

__all__ = ["Lease", "LeasedBlock", "open_lease"]

_MARGIN = 64  # alignment of packed states in memory


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
        index, stream = self._lease._stream(name)
        start = self._lease._segments(self.held_tokens)[index]
        whole = self.payload[start : start + stream.rows(self.held_tokens) * stream.row_bytes]
        array = whole.view(stream.view_dtype).reshape(stream.array_shape(self.held_tokens))
        return array[(slice(None),) * stream.token_axis + (slice(0, stream.rows(self.tokens)),)]


class _Blocks(Sequence[LeasedBlock]):
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


class Lease:
    """A stored prefix of a prompt, pinned: its bytes stay in place while the lease or any view made from it lives.

    Use it in a `with` block. Keep it short: a lease pins every page that is freed after it began. Its methods may be called
    from any thread, one at a time. False when nothing is stored.

    Attributes
    ----------
    length : int
        Leading tokens that the lease holds. 0 is a miss.
    tokens : uint32 array
        Those tokens.
    """

    def __init__(self, scope: NamespaceScope, tokens: TokenArray, pin: Pin, found: Found) -> None:
        self._pin: Pin | None = None
        self._scope = scope
        self._checkpoint = found.checkpoint
        self._streams = {stream.name: (i, stream) for i, stream in enumerate(scope.layout.streams)}
        self._validated = False
        self.length = found.length
        self.tokens = tokens[: found.length]
        self._located = locate_rows(scope, pin, found)
        self._states = locate_states(scope, pin, found)
        self._filler = Filler(scope, pin, self._located, self._states)
        if found.length:
            scope.store.touch(found.path.node_at(found.length).node)
        self._pin = pin  # last, so that the lease owns the pin only once it is whole

    def __bool__(self) -> bool:
        return self.length > 0

    def __enter__(self) -> Lease:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def __del__(self) -> None:
        if getattr(self, "_pin", None) is not None:
            self._end()

    def _open(self) -> Pin:
        if self._pin is None:
            raise LeaseClosedError("the lease has ended; take a new one with namespace.lease(tokens)")
        return self._pin

    def _end(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.drop()

    def close(self) -> None:
        """End the lease now. Idempotent.

        Raises
        ------
        ViewsAliveError
            When arrays made from it are still alive; nothing is closed then. (Leaving the `with` block does not raise: the
            transaction then ends with the last view.)
        """
        if self._pin is not None and self._pin.held:
            raise ViewsAliveError("views of the lease are alive; delete them first, or copy what you need")
        self._end()

    @property
    def blocks(self) -> Sequence[LeasedBlock]:
        """The blocks that hold the rows, in order of position. A block is made when it is asked for."""
        self._open()
        return _Blocks(self, self._located)

    def views(self, name: str) -> list[Array]:
        """One read-only array for each block: the rows of a stream, in order of position. See `LeasedBlock.stream`."""
        return [block.stream(name) for block in self.blocks]

    def map(self) -> Mapped:
        """All blocks as one writeable run of memory in pages of equal size, made of the store's own file pages.

        For engines that keep their state in pages of `layout.block_tokens` positions. Nothing is copied but the rows of a last
        block that isn't whole. Costs address space, and one map of the process for each block. **Only headers are checked, as
        with views**; `validate` checks the bytes. It outlives the lease; `close` counts it as a view until it is detached. See
        `Mapped` for what it holds, and for when touching it is SIGBUS.

        Raises
        ------
        MappingError
            At a limit of address space or of the number of maps; where the system's pages are larger than 4 KiB.
        BlockDamaged
            When a byte of the last block, if it isn't whole, isn't what was saved. The block is refused from now on.
        LeaseClosedError
            After the lease has ended.
        """
        return map_blocks(self._scope, self._open(), self._located, self._filler)

    def copy_into(
        self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None, threads: int | None = None
    ) -> None:
        """Copy rows of positions [start, stop) of every named stream into the caller's arrays, checking every byte in the same pass.

        So a session can go through a buffer that is smaller than it, piece by piece; a piece costs what it holds, however long
        the session is. Blocks are checked whole: what is wrong with the last block of the range behind `stop` is met as well.

        Parameters
        ----------
        arrays : mapping of str to ndarray or Paged
            Any of the layout's streams. Each has the stream's shape and view dtype, any strides, and along its token axis
            at least the rows of the range; index 0 is the row of `start`, and rows behind those of the range are left alone. Not
            overlapping. In pages, likewise: the first slot is that of the row of `start`.
        start : int
            First position, a multiple of `layout.block_tokens`.
        stop : int, optional
            Position behind the last, at most `length`, which is the default. Of a stream with a row for several positions, those
            rows are copied whose positions all lie in the range.
        threads : int, optional
            Threads to copy with; by default one for each processor, at most 8. The GIL is released.

        Raises
        ------
        ArrayError
            When an array doesn't fit, or the range, before a byte moves.
        BlockDamaged
            When a byte isn't what was saved. The arrays' contents are undefined then, and the block is refused from now on.
        LeaseClosedError
            After the lease has ended.
        """
        source = self._source()
        blocks, tokens = self._range(start, stop)
        self._filler.rows(self._destinations(arrays, tokens), blocks=blocks, tokens=tokens, threads=threads)
        source.restored((stream for name, (_, stream) in self._streams.items() if name in arrays), tokens)

    def start_copy(
        self, arrays: Mapping[str, StreamArray], *, start: int = 0, stop: int | None = None, threads: int | None = None
    ) -> Transfer:
        """Do the same as `copy_into` on a thread of its own, stream after stream in layout order.

        So an engine can start on the first layers while the others come. The arrays belong to the transfer until it is over:
        nobody reads a stream before it was waited for, or writes any. The lease may end meanwhile (its `close` refuses to, as with
        views; leaving its block does not).

        Parameters
        ----------
        arrays, start, stop, threads
            As for `copy_into`.

        Returns
        -------
        Transfer
            What to wait on.

        Raises
        ------
        ArrayError
            When an array doesn't fit, or the range, before a byte moves. What happens later is raised by the transfer.
        LeaseClosedError
            After the lease has ended.
        """
        source = self._source()
        blocks, tokens = self._range(start, stop)
        rows = self._destinations(arrays, tokens)
        named = [i for name, (i, _) in self._streams.items() if name in arrays]
        return start_copy(source, rows, named, blocks, tokens, threads)

    def to_device(
        self,
        destinations: Mapping[str, object],
        *,
        staging: Staging,
        stream: int | None = None,
        threads: int | None = None,
        ring: int = 2,
    ) -> DeviceTransfer:
        """Copy rows [0, length) of every named stream to a CUDA device, stream after stream in layout order.

        A thread of its own fills and checks one staging buffer while the one before is on its way. When a block turns out to be
        damaged, none of its rows that failed are copied and the transfer fails; what was computed on streams that had come
        before is to be thrown away. States are had with `states()`, on the host.

        Parameters
        ----------
        destinations : mapping of str to array
            Any of the layout's streams: objects with `__dlpack__` (PyTorch, CuPy) or `__cuda_array_interface__`, or a
            `DeviceArray`. Each has the stream's shape and elements of its size, and along its token axis at least the rows of
            `length` positions. What lies behind the token axis is contiguous, and each row apart from the next; other strides
            are free. Not overlapping. They are kept until the transfer is over.
        staging : Staging
            Buffers of the same device.
        stream : int, optional
            The CUDA stream to copy on; by default one of the transfer's own, which waits for what was queued on the
            destinations as far as they name a stream (DLPack and `__cuda_array_interface__` do).
        threads : int, optional
            Threads to fill buffers with, as for `copy_into`.
        ring : int
            Staging buffers to use in turn.

        Returns
        -------
        DeviceTransfer
            What to wait on, on the host or by a CUDA stream.

        Raises
        ------
        ArrayError
            When a destination or a staging buffer doesn't fit, before a byte moves.
        DeviceError
            The staging buffers have no device, or it fails.
        LeaseClosedError
            After the lease has ended. What happens later is raised by the transfer.
        """
        return start_device_copy(self._source(), destinations, staging, stream, threads, ring)

    def _source(self) -> Source:
        return Source(self._scope, self._open(), self._filler, self._located, self.length)

    def _range(self, start: int, stop: int | None) -> tuple[slice, int]:
        """Which blocks hold the positions [start, stop), and how many positions those are."""
        stop, step = self.length if stop is None else stop, self._scope.layout.block_tokens
        if start % step or not 0 <= start <= stop <= self.length:
            raise ArrayError(
                f"positions [{start}, {stop}) asked for: expected a range within [0, {self.length}), what the lease holds, that "
                f"starts at a multiple of {step}, the tokens of a block"
            )
        return slice(start // step, -(-stop // step)), stop - start

    def _destinations(self, arrays: Mapping[str, StreamArray], tokens: int) -> list[Rows]:
        check_named(self._scope.layout, arrays, all_of_them=False)
        rows = []
        for name, (_, stream) in self._streams.items():
            array = arrays.get(name)
            if array is not None:
                check_rows(stream, array, tokens, exact=False)
                if not writeable(array):
                    raise ArrayError(f"stream {name!r}: the destination is read-only")
            if array is None or not stream.rows(tokens):
                rows.append(Rows.skip(row_bytes=stream.row_bytes, tokens_per_row=stream.tokens_per_row))
                continue
            rows.append(rows_of(stream, array))
        return rows

    def states(self) -> dict[str, Array]:
        """Copies of all states at position `length`, every byte checked; empty for a layout without states.

        Raises
        ------
        BlockDamaged
            When a byte isn't what was saved. The block is refused from now on.
        """
        self._open()
        if self._checkpoint is None:
            return {}
        raw = np.empty(self._checkpoint.packed_bytes + _MARGIN, np.uint8)
        skip = -raw.__array_interface__["data"][0] % _MARGIN
        packed = raw[skip : skip + self._checkpoint.packed_bytes]
        self._filler.states(packed)
        try:
            return unpack_states(self._scope.layout, packed)
        except IndexDamaged as error:
            raise self._filler.damaged(self._states, 0, str(error)) from error

    def validate(self) -> None:
        """Check every byte of all blocks, states included, without copying. Done once a lease; later calls return at once.

        Raises
        ------
        BlockDamaged
            When a byte isn't what was saved. The block is refused from now on.
        """
        self._open()
        if self._validated:
            return
        # room for one row, of which none is used: the kernel checks each segment whole whatever it copies of it
        rows = [rows_of(s, np.empty(s.array_shape(s.tokens_per_row), s.view_dtype)) for _, s in self._streams.values()]
        self._filler.rows(rows, used=False)
        self._filler.states(None)
        self._validated = True

    def _stream(self, name: str) -> tuple[int, Stream]:
        try:
            return self._streams[name]
        except KeyError:
            raise ArrayError(f"the layout has no stream {name!r}; it has {list(self._streams)}") from None

    def _segments(self, tokens: int) -> tuple[int, ...]:
        return self._scope.layout.segments(tokens)


def open_lease(scope: NamespaceScope, tokens: TokenArray, limit: int) -> Lease:
    """Take a lease on the longest prefix of at most `limit` tokens whose blocks' headers are whole.

    A block whose header is damaged is refused, and the lease is on what comes before it.
    """
    prompt = token_bytes(tokens)
    scope.store.write_old_touches()
    while True:
        pin = Pin(scope.store)
        try:
            found = find_prefix(scope, pin.reader, prompt, limit)
            lease = Lease(scope, tokens, pin, found)
        except BlockDamaged as error:
            pin.drop()
            scope.store.refuse(error.block_id, error.offset)
            continue
        except BaseException:
            pin.drop()
            raise
        scope.store.counters.leases += 1
        return lease
