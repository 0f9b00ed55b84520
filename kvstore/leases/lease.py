"""A lease: match and pin in one step, and the ways to get at the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.arrays import Array, StreamArray, rows_of
from kvstore.errors import ArrayError, BlockDamaged, IndexDamaged, LeaseClosedError, ViewsAliveError
from kvstore.ids import TokenArray, token_bytes
from kvstore.kernel import address_of
from kvstore.layout import Stream
from kvstore.leases.blocks import Blocks, LeasedBlock, Views
from kvstore.leases.chunks import Chunk, Chunks, start_chunks
from kvstore.leases.described import Described, describe
from kvstore.leases.device import DeviceTransfer, start_device_copy
from kvstore.leases.fill import Filler
from kvstore.leases.located import locate_rows, locate_states
from kvstore.leases.mapped import Mapped, map_blocks
from kvstore.leases.match import Found, find_prefix
from kvstore.leases.pin import Pin
from kvstore.leases.transfer import Source, Transfer, start_copy
from kvstore.records.states import unpack_states
from kvstore.scope import NamespaceScope
from kvstore.staging import Staging

__all__ = ["Lease", "open_lease"]

_MARGIN = 64  # alignment of packed states in memory


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
        self._described = Described(scope.layout)
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
            self._described.forget()
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
        return Blocks(self, self._located)

    def views(self, name: str) -> Sequence[Array]:
        """One read-only array for each block: the rows of a stream, in order of position.

        An array is made when it is asked for; each, and the sequence itself, stays valid as long as it lives, after the lease
        too. Nothing is copied and nothing validated: see `LeasedBlock.payload`.
        """
        pin = self._open()
        return Views(self._scope.layout, self._stream(name)[0], pin, self._located)

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
        """Copy rows of positions [start, stop) of each named stream into the caller's arrays, checking every byte in the same pass.

        So a session can go through a buffer that is smaller than it, piece by piece; a piece costs what it holds, however long
        the session is, and least with the same arrays each time (the lease keeps those of the last call). Blocks are checked
        whole: what is wrong with the last block of the range behind `stop` is met as well.

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
        self._filler.rows(self._described.target(arrays, tokens), blocks=blocks, tokens=tokens, threads=threads)
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
        rows = describe(self._scope.layout, arrays, tokens)
        named = [i for name, (i, _) in self._streams.items() if name in arrays]
        return start_copy(source, rows, named, blocks, tokens, threads)

    def chunks(self, chunks: Sequence[Chunk], *, ahead: int = 1, threads: int | None = None) -> Chunks:
        """Copy rows chunk by chunk, every byte checked, the next chunks while the caller reads the one before.

        For engines that take state through a small buffer of their own: `for chunk in chunks` gives each once it is in place. Three
        buffers of a few MiB, in turns, with `ahead=2`, do as well as larger ones or better: what was copied is still in the
        processor's caches, and two that have to be read from the disk are read at once.

        Parameters
        ----------
        chunks : sequence of Chunk
            Each starts where the one before stops, at a multiple of `layout.block_tokens`. Their buffers all have the same streams.
        ahead : int
            How many chunks may be in place, or under way, beyond the one that the caller has. A chunk's buffer must not overlap
            those of the `ahead` chunks before it; other chunks may have the same.
        threads : int, optional
            Threads to copy with; by default one for each processor, at most 8.

        Returns
        -------
        Chunks
            What to iterate over, in a `with` block.

        Raises
        ------
        ArrayError
            When a range or a buffer doesn't fit, or a buffer is in use for other chunks, until those are taken or closed. The
            iteration raises it where buffers overlap; no byte has moved then either.
        BlockDamaged
            In the iteration, when a byte isn't what was saved: that chunk isn't handed out, and the block is refused from now on.
        LeaseClosedError
            After the lease has ended.
        """
        return start_chunks(self._source(), chunks, ahead, threads)

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

    @property
    def states_bytes(self) -> int:
        """Bytes of a buffer for `states`; 0 for a lease without states."""
        return 0 if self._checkpoint is None else self._checkpoint.packed_bytes + _MARGIN

    def states(self, *, into: npt.NDArray[np.uint8] | None = None) -> dict[str, Array]:
        """Copies of all states at position `length`, every byte checked; empty for a layout without states.

        Parameters
        ----------
        into : uint8 array, optional
            A contiguous, writeable buffer of at least `states_bytes` bytes, at any address, that the arrays become views of;
            fresh memory by default. Touching that for the first time may cost as much as the copy, so who restores states of
            tens of megabytes again and again keeps a buffer. The arrays hold what they should until it is used again.

        Raises
        ------
        ArrayError
            When the buffer doesn't fit, before a byte moves.
        BlockDamaged
            When a byte isn't what was saved. The block is refused from now on.
        """
        self._open()
        if self._checkpoint is None:
            return {}
        raw = np.empty(self.states_bytes, np.uint8) if into is None else into
        if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or raw.ndim != 1 or not raw.flags.c_contiguous:
            raise ArrayError(
                f"states go into a contiguous uint8 array of one axis, got {getattr(raw, 'dtype', type(raw).__name__)}"
            )
        if raw.nbytes < self.states_bytes or not raw.flags.writeable:
            raise ArrayError(
                f"states of {self.states_bytes} bytes don't go into {raw.nbytes} bytes"
                f"{'' if raw.flags.writeable else ' that are read-only'}; see `states_bytes`"
            )
        skip = -address_of(raw) % _MARGIN
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
