"""One sequence of a llama.cpp context as an engine: takes out what is new, puts back what is stored."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError, LlamaCppError
from kvstore.adapters.llamacpp.frame import Cells, Frame, fit
from kvstore.adapters.llamacpp.functions import ALL, PARTIAL, Functions
from kvstore.adapters.llamacpp.geometry import POSITION, Geometry
from kvstore.adapters.llamacpp.learn import learn
from kvstore.adapters.llamacpp.slot import Slot, Slots
from kvstore.errors import EngineError, LayoutError
from kvstore.kernel import address_of
from kvstore.layout import Layout, Stream
from kvstore.leases import Chunk
from kvstore.tier.protocol import Array, Captured, Restored

__all__ = ["LlamaCppEngine"]

_CHUNK_BYTES = 4 << 20  # what is restored at a time, a block of usual size: see docs/architecture.md
_STATES = -1  # beside the flags of blobs: the key of the buffer in which states are restored
_REQUIRED = ("build", "weights")
_UNSUPPORTED = (
    "this adapter takes models with K and V for every position or a sliding window, recurrent layers, or a mix of these, and "
    "none with MLA or other state; the context must be made with kv_unified = true and n_seq_max >= 2"
)


class LlamaCppEngine:
    """A sequence of a `llama_context`, as `kvstore.tier.Engine` wants it. Not thread-safe, as the context isn't.

    Attention rows are streams, cut at any token. A sliding window and recurrent layers are states: they are handed out, and
    can be restored, at the position where the sequence stands and at no other. So such models resume at checkpoints. After a
    restore the window's cells lie in other places of llama.cpp's cache than before; where its kernels sum in the order of
    the cells, the logits of later tokens differ in their last bits from those of a context that went on.

    A blob tells positions, and not what was read before them. So a sequence is saved only as long as it has read its tokens from
    position 0 on and nothing else: never after a context shift or self-extend (`llama_memory_seq_add`, `llama_memory_seq_div`),
    which keep rows that have seen tokens that are gone. Nothing here can notice that.

    The layout must be known before the first token is computed, because promote comes first; but only a blob with at least
    one cell shows the types and shapes of the rows. So either the sequence holds tokens already, or the caller passes
    `probe`, which evaluates one token in the scratch sequence; the engine reads its blob and removes it again.

    Parameters
    ----------
    library : ctypes library
        Anything with the functions of libllama as attributes. Its prototypes are left as they are.
    context : int or c_void_p
        The address of the `llama_context`, made with `kv_unified` and `n_seq_max` of 2 or more. It must outlive the engine,
        and nobody else may use it, or the two sequences, during a call.
    model : str
        The model's name, for people.
    identity : mapping of str to (str or int)
        What else changes the bytes of the state. `build` (of libllama, backend included: a blob carries no version) and
        `weights` (a digest of the model's file) are required. What belongs here as well: rope and yarn settings other than
        the model's own, `n_ubatch`, `n_batch` and flash attention (they change the last bits), a LoRA unless it goes into
        the salt. What is read from the blob (types, rotation, transposition, window) need not be given. Context size,
        threads and devices of one kind don't belong here.
    probe : callable, optional
        Called once, with the scratch sequence's id: evaluate any one token at position 0 of that sequence.
    seq_id, scratch_seq_id : int
        The session's sequence, and one that the engine may fill and clear. It must be empty between calls.
    block_tokens : int
        Positions in a block, see `Layout`; by default what the size of the rows makes good. Identity.
    chunk_bytes : int
        Rows that are restored at a time, rounded down to blocks, one at least: the size of four buffers that are kept between
        calls, one of them for a last chunk that is shorter. A call costs some 0.1 ms more for each chunk; ones that don't fit
        the processor's caches together are slower.

    Raises
    ------
    LayoutError
        When the context's state is not of the kind that this adapter takes, when there is neither a probe nor a token to
        learn the layout from, or when the identity lacks a required key.
    EngineError
        When the two sequences are one, or the scratch sequence is in use.
    LlamaCppError
        When the library lacks a function, or the context isn't one.
    """

    def __init__(
        self,
        library: object,
        context: int | ctypes.c_void_p,
        *,
        model: str,
        identity: Mapping[str, str | int],
        probe: Callable[[int], object] | None = None,
        seq_id: int = 0,
        scratch_seq_id: int = 1,
        block_tokens: int = 0,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        if seq_id == scratch_seq_id or min(seq_id, scratch_seq_id) < 0:
            raise EngineError(f"the session and the scratch sequence must be two, got {seq_id} and {scratch_seq_id}")
        self._seq, self._scratch = seq_id, scratch_seq_id
        self._functions = Functions(library, context)
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._geometry = self._learn(probe)
        self._layout = _layout(self._geometry, model, identity, block_tokens)
        block = self._layout.block_tokens
        # rows may have no bytes, where every layer has a window; then there are their cells
        block_bytes = self._layout.payload_bytes(block) + block * self._geometry.cell.itemsize
        self._step = block * max(1, chunk_bytes // block_bytes)  # positions of a chunk
        self._slots = self._no_slots()

    def layout(self) -> Layout:
        """What the session's state consists of.

        Streams `k.0`, `v.0`, `k.1` and so on, one pair for each layer that sees every position. States `window.k.0`,
        `window.v.0` and so on for the layers of a sliding window, `r.0`, `s.0` and so on for recurrent layers, and with
        either the `position` that they are of.
        """
        return self._layout

    def capture(self, start: int, stop: int) -> Captured:
        """Hand out the rows of [start, stop), and the states if the sequence ends at `stop`: valid until the next call.

        Only these positions leave the engine; the time and the memory (one blob, kept for the next call) are in
        proportion to them. Ask for long ranges in chunks. With recurrent layers each call reads their state as well.

        Raises
        ------
        EngineError
            When the sequence does not hold these positions, or somebody else has filled the scratch sequence.
        BlobError
            When the blob is not what the layout was learned from; when rows are missing, or cells of the window are, as after
            a sequence was cut back; when some positions are not of text.
        """
        rows = self._rows(start, stop)
        return Captured(rows, self._states() if stop == self._position() else {})

    def apply(self, restored: Restored) -> None:
        """Take a stored prefix: chunk by chunk through a few small buffers and the scratch sequence, then the states.

        Each chunk has passed its checks before libllama reads it. What is raised in the middle leaves the sequence with a part
        of the prefix, for `reset` to clear.

        Raises
        ------
        EngineError
            When the states are not of the position that is restored, or the window's do not fit it; when somebody else has
            filled the scratch sequence. The sequence is as it was.
        LlamaCppError
            When libllama does not take a chunk (too small a context, or cells in use by other sequences), or the sequence
            does not stand where it should afterwards.
        """
        geometry, length = self._geometry, restored.length
        self._check_scratch(partial=geometry.partial)
        partial = self._partial_blob(restored) if geometry.partial else None
        with self._chunks(restored) as chunks:
            # while the first one is copied
            self._functions.remove(self._seq)
            nbytes = Frame(geometry, Cells.of_rows(geometry, length)).nbytes
            for chunk, slot in chunks:
                self._put(chunk, slot, restored)
        if partial is not None:
            self._set(partial, self._seq, PARTIAL, length)
            nbytes += partial.size - self._empty(rows=False)
        self._check_restored(length, nbytes)

    @contextlib.contextmanager
    def _chunks(self, restored: Restored) -> Iterator[Iterable[tuple[Chunk, Slot]]]:
        """Cut the rows into chunks and begin to copy them; give each with the buffer that it's in, as soon as it is."""
        if self._geometry.rows is None or not restored.length:
            yield ()
            return
        chunks, slots = list[Chunk](), list[Slot]()
        for start in range(0, restored.length, self._step):
            stop = min(start + self._step, restored.length)
            slots.append(self._slots.get(len(slots), stop - start))
            chunks.append(Chunk(start, stop, slots[-1].buffer))
        try:
            with restored.chunks(chunks, ahead=self._slots.ahead) as filled:
                yield zip(filled, slots, strict=True)
        except BaseException:
            self._slots = self._no_slots()  # whatever has happened to these
            raise

    def _no_slots(self) -> Slots:
        return Slots(self._geometry, self._layout, self._step)

    def _put(self, chunk: Chunk, slot: Slot, restored: Restored) -> None:
        """Add a chunk to the sequence, through the scratch sequence."""
        slot.place(self._scratch, chunk.stop, restored.tokens)
        try:
            self._set(slot.blob, self._scratch, 0, restored.length)
            self._functions.copy(self._scratch, self._seq, ALL, ALL)
        finally:
            self._functions.remove(self._scratch)

    def _check_restored(self, length: int, nbytes: int) -> None:
        low, high = self._functions.span(self._seq)
        held = self._functions.size(self._seq)
        if high != length - 1 or (low and not self._geometry.partial) or held != nbytes:
            raise LlamaCppError(
                f"after restoring {length} positions the sequence holds {low} to {high}, with {held} of {nbytes} bytes of state"
            )

    def reset(self) -> None:
        """Clear the session's sequence. The scratch sequence is empty after every call, also after one that raised."""
        self._functions.remove(self._seq)

    def arrays(self, length: int) -> dict[str, Array]:
        """Hand out the rows of [0, length) and the states, as `kvstore.layout.state_hash` takes them; valid until the next call.

        Raises
        ------
        EngineError
            As `capture`; and when the layout has states and the sequence does not end at `length`.
        """
        if self._geometry.partial and length != self._position():
            raise EngineError(f"the states are of position {self._position()}, asked for {length}")
        captured = self.capture(0, length)
        return {name: array for name, array in {**captured.streams, **captured.states}.items() if isinstance(array, np.ndarray)}

    def release(self) -> None:
        """Give back the memory that is kept between calls; the next call takes new memory."""
        self._buffers, self._slots = {}, self._no_slots()

    def _position(self) -> int:
        return self._functions.span(self._seq)[1] + 1

    def _rows(self, start: int, stop: int) -> dict[str, Array]:
        low, high = self._functions.span(self._seq)
        first = 0 if self._geometry.partial else low  # with a window or recurrent layers `low` is theirs
        if not 0 <= start < stop or first > start or high < stop - 1:
            raise EngineError(f"sequence {self._seq} holds positions {low} to {high}, asked for [{start}, {stop})")
        self._check_scratch(partial=self._geometry.partial)
        if self._geometry.rows is None or not self._geometry.rows.keys:
            return {}
        self._functions.copy(self._seq, self._scratch, start, stop)
        try:
            nbytes = self._functions.size(self._scratch)
            frame = fit(self._geometry, stop - start, 1, nbytes)
            blob = self._get(self._scratch, nbytes)
        finally:
            self._functions.remove(self._scratch)
        order = frame.check(blob, self._scratch, stop, at=high + 1)["rows"]
        return _in_order(frame.streams(blob), self._layout.streams, order)

    def _states(self) -> dict[str, Array]:
        """Read what is valid at the sequence's position only, cells of a window in the order of their positions."""
        geometry, position = self._geometry, self._position()
        if not geometry.partial:
            return {}
        nbytes = self._functions.size(self._seq, PARTIAL)
        frame = fit(geometry, None, 1, nbytes)
        if geometry.window is not None and not _fills(frame.cells.window or 0, position, geometry.window_cells):
            raise BlobError(
                f"the window holds {frame.cells.window} of the {geometry.window_cells} positions before {position}: the "
                "sequence was cut back to where its window is gone"
            )
        blob = self._get(self._seq, nbytes, PARTIAL)
        order = frame.check(blob, self._seq, position, at=position)["window"]
        window = () if geometry.window is None else geometry.window.streams("window.")
        return {POSITION: np.array([position], np.uint32), **_in_order(frame.states(blob), window, order)}

    def _partial_blob(self, restored: Restored) -> npt.NDArray[np.uint8]:
        """Make a blob of the states, after looking whether they are of this position."""
        geometry, length = self._geometry, restored.length
        states = restored.states(into=self._room(restored.states_bytes, _STATES))
        position = int(states[POSITION][0])
        if position != length:
            raise EngineError(f"the states are of position {position}, and the rows end at {length}: never mixed")
        window = None
        if geometry.window is not None:
            streams = geometry.window.streams("window.")
            held = {states[stream.name].shape[stream.token_axis] for stream in streams}
            window = held.pop() if len(held) == 1 else -1
            if not _fills(window, length, geometry.window_cells):
                raise EngineError(f"the window's states have not all the {geometry.window_cells} positions before {length}")
        frame = Frame(geometry, Cells(None, window, None if geometry.recurrent is None else 1))
        blob = self._room(frame.nbytes, PARTIAL)
        frame.write(blob, self._seq, length, restored.tokens)
        for state in self._layout.states:
            state.check_array(states[state.name])
        for name, array in frame.states(blob).items():
            array[...] = states[name]
        return blob

    def _set(self, blob: npt.NDArray[np.uint8], seq: int, flags: int, length: int) -> None:
        taken = self._functions.set(address_of(blob), blob.size, seq, flags)
        if taken != blob.size:
            raise LlamaCppError(
                f"libllama took {taken} of the {blob.size} bytes of {length} positions; is the context large enough, "
                "and are its cells free of other sequences?"
            )

    def _room(self, nbytes: int, flags: int = 0) -> npt.NDArray[np.uint8]:
        """Take the buffer of a kind of blob, or of states; what was in it is gone."""
        if flags not in self._buffers or self._buffers[flags].size < nbytes:
            self._buffers.pop(flags, None)  # before the new one is taken, so that both are never there at once
            self._buffers[flags] = np.empty(nbytes, np.uint8)
        return self._buffers[flags][:nbytes]

    def _get(self, seq: int, nbytes: int, flags: int = 0) -> npt.NDArray[np.uint8]:
        if not nbytes:
            raise LlamaCppError(f"libllama has no state of sequence {seq}")
        blob = self._room(nbytes, flags)
        written = self._functions.get(blob.ctypes.data, nbytes, seq, flags)
        if written != nbytes:
            raise LlamaCppError(f"libllama wrote {written} of {nbytes} bytes of state")
        return blob

    def _check_scratch(self, *, partial: bool) -> None:
        low, high = self._functions.span(self._scratch)
        # with recurrent layers a sequence that holds rows alone has no position
        filled = partial and self._functions.size(self._scratch) != self._empty()
        if high >= 0 or filled:
            raise EngineError(
                f"scratch sequence {self._scratch} holds positions {low} to {high}; give the engine one that nobody else uses"
            )

    def _empty(self, *, rows: bool = True) -> int:
        """Bytes of the blob of an empty sequence, or of its partial one."""
        cells = Cells.of_rows(self._geometry, 0)
        return Frame(self._geometry, cells if rows else cells._replace(rows=None)).nbytes

    def _learn(self, probe: Callable[[int], object] | None) -> Geometry:
        self._check_scratch(partial=False)
        filled = self._functions.span(self._seq)[1] >= 0
        if probe is None and not filled:
            raise LayoutError(
                "an empty context shows neither types nor shapes of its state; pass probe= (a function that evaluates one "
                "token at position 0 of the sequence it is given), or make the engine after the first token"
            )
        seq = self._seq if probe is None else self._scratch
        try:
            if probe is not None:
                _call(probe, seq)
            geometry = self._geometry_of(seq)
            if probe is None:
                self._try_scratch(geometry)
        except BlobError as error:
            raise LayoutError(f"{error}; {_UNSUPPORTED}") from error
        finally:
            self._functions.clear(self._scratch)
        self._check_scratch(partial=False)
        self._buffers = {}
        return geometry

    def _geometry_of(self, seq: int) -> Geometry:
        blob = self._get(seq, self._functions.size(seq))
        geometry = learn(blob, seq, window_cells=self._functions.window_cells)
        if geometry.partial:
            partial = self._get(seq, self._functions.size(seq, PARTIAL), PARTIAL)
            head = struct.calcsize("<Ii")
            if partial.size > blob.size or not np.array_equal(partial[head:], blob[blob.size - partial.size + head :]):
                raise BlobError(
                    "the partial blob is not the end of the whole one: this build has no partial state as it is known here"
                )
        return geometry

    def _try_scratch(self, geometry: Geometry) -> None:
        """See whether the scratch sequence can hold a cell; a probe has shown that by itself."""
        last = self._position()
        self._functions.copy(self._seq, self._scratch, last - 1, last)
        try:
            nbytes = self._functions.size(self._scratch)
            frame = fit(geometry, 1, 1, nbytes)
            frame.check(self._get(self._scratch, nbytes), self._scratch, last, at=last)
        except (BlobError, LlamaCppError) as error:
            raise BlobError(f"a range cannot be copied to sequence {self._scratch} ({error})") from error


def _fills(cells: int, position: int, window: int) -> bool:
    """Whether that many cells are all that a window may need at a position.

    The next token sees the `window - 1` before it; llama.cpp writes one more where there is one.
    """
    return min(position, window - 1) <= cells <= min(position, window)


def _in_order(arrays: dict[str, Array], streams: tuple[Stream, ...], order: npt.NDArray[np.intp] | None) -> dict[str, Array]:
    """Put the rows of the streams in the order of their positions, where they are not; other arrays are left alone."""
    if order is None:
        return arrays
    axes = {stream.name: stream.token_axis for stream in streams}
    return {name: array.take(order, axis=axes[name]) if name in axes else array for name, array in arrays.items()}


def _call(probe: Callable[[int], object], seq: int) -> None:
    try:
        probe(seq)
    except Exception as error:  # the caller's code may raise anything
        raise LayoutError(f"the probe could not evaluate a token in sequence {seq} ({error}); {_UNSUPPORTED}") from error


def _layout(geometry: Geometry, model: str, identity: Mapping[str, str | int], block_tokens: int) -> Layout:
    missing = [key for key in _REQUIRED if identity.get(key) in (None, "")]
    if missing:
        raise LayoutError(
            f"identity lacks {', '.join(missing)}; state of another build or of other weights is accepted by libllama in "
            "silence, so name both"
        )
    learned = geometry.identity()
    twice = sorted(set(learned) & set(identity))
    if twice:
        raise LayoutError(f"identity gives {', '.join(twice)}, which the adapter reads from the engine itself; leave it out")
    named = {**identity, **learned}
    return Layout(geometry.streams(), geometry.states(), model=model, identity=named, block_tokens=block_tokens)
