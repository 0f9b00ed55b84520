"""One sequence of a llama.cpp context as an engine: takes out what is new, puts back what is stored."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvstore.adapters.llamacpp.errors import BlobError, LlamaCppError
from kvstore.adapters.llamacpp.frame import Frame
from kvstore.adapters.llamacpp.functions import Functions
from kvstore.adapters.llamacpp.geometry import Geometry, learn
from kvstore.errors import EngineError, LayoutError
from kvstore.layout import Layout
from kvstore.tier.protocol import Array, Captured, Restored

__all__ = ["LlamaCppEngine"]

_REQUIRED = ("build", "weights")
_UNSUPPORTED = (
    "this adapter takes attention-only models with K and V for every position. Sliding-window, recurrent, hybrid, MLA and "
    "M-RoPE models keep state of another kind; the context must be made with kv_unified = true and n_seq_max >= 2"
)


class LlamaCppEngine:
    """A sequence of a `llama_context`, as `kvstore.tier.Engine` wants it. Not thread-safe, as the context isn't.

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
        the salt. What is read from the blob (types, rotation, transposition) need not be given. Context size, threads and
        devices of one kind don't belong here.
    probe : callable, optional
        Called once, with the scratch sequence's id: evaluate any one token at position 0 of that sequence.
    seq_id, scratch_seq_id : int
        The session's sequence, and one that the engine may fill and clear. It must be empty between calls.

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
    ) -> None:
        if seq_id == scratch_seq_id or min(seq_id, scratch_seq_id) < 0:
            raise EngineError(f"the session and the scratch sequence must be two, got {seq_id} and {scratch_seq_id}")
        self._seq, self._scratch = seq_id, scratch_seq_id
        self._functions = Functions(library, context)
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._geometry = self._learn(probe)
        self._layout = _layout(self._geometry, model, identity)

    def layout(self) -> Layout:
        """What the session's state consists of: streams `k.0`, `v.0`, `k.1` and so on, one pair for each layer."""
        return self._layout

    def capture(self, start: int, stop: int) -> Captured:
        """Hand out the rows of [start, stop): views of one blob, valid until the next call.

        Only these positions leave the engine; the time and the memory (one blob, kept for the next call) are in
        proportion to them. Ask for long ranges in pieces.

        Raises
        ------
        EngineError
            When the sequence does not hold these positions, or somebody else has filled the scratch sequence.
        BlobError
            When the blob is not what the layout was learned from.
        """
        return Captured(self._rows(start, stop))

    def apply(self, restored: Restored) -> None:
        """Take a stored prefix: scatter it into one blob, validated, then let the sequence read that.

        Nothing of the engine is touched before all bytes have passed their checks.

        Raises
        ------
        LlamaCppError
            When libllama does not take all of the blob (too small a context, or cells in use by other sequences), or the
            sequence does not stand where it should afterwards.
        """
        length = restored.length
        frame = Frame(self._geometry, length)
        blob = self._room(frame.nbytes)
        frame.write(blob, self._seq)
        restored.copy_into(frame.arrays(blob))
        self._functions.remove(self._seq)
        taken = self._functions.set(blob.ctypes.data, blob.size, self._seq)
        if taken != blob.size:
            raise LlamaCppError(
                f"libllama took {taken} of the {blob.size} bytes of {length} positions; is the context large enough, "
                "and are its cells free of other sequences?"
            )
        span = self._functions.span(self._seq)
        if span != (0, length - 1):
            raise LlamaCppError(f"after restoring {length} positions the sequence holds {span[0]} to {span[1]}")

    def reset(self) -> None:
        """Clear the session's sequence. The scratch sequence is empty after every call, also after one that raised."""
        self._functions.remove(self._seq)

    def arrays(self, length: int) -> dict[str, Array]:
        """Hand out the rows of [0, length), as `kvstore.layout.state_hash` takes them; valid until the next call."""
        return self._rows(0, length)

    def release(self) -> None:
        """Give back the memory that is kept between calls; the next call takes new memory."""
        self._buffer = np.empty(0, np.uint8)

    def _rows(self, start: int, stop: int) -> dict[str, Array]:
        low, high = self._functions.span(self._seq)
        if not 0 <= start < stop or low > start or high < stop - 1:
            raise EngineError(f"sequence {self._seq} holds positions {low} to {high}, asked for [{start}, {stop})")
        self._check_scratch()
        frame = Frame(self._geometry, stop - start)
        self._functions.copy(self._seq, self._scratch, start, stop)
        try:
            blob = self._blob(self._scratch, frame.nbytes)
        finally:
            self._functions.remove(self._scratch)
        order = frame.check(blob, self._scratch, start)
        arrays = frame.arrays(blob)
        if order is not None:
            axes = {stream.name: stream.token_axis for stream in self._layout.streams}
            arrays = {name: array.take(order, axis=axes[name]) for name, array in arrays.items()}
        return arrays

    def _room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._buffer.size < nbytes:
            self.release()  # before the new one is taken, so that both are never there at once
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _blob(self, seq: int, expected: int | None = None) -> npt.NDArray[np.uint8]:
        nbytes = self._functions.size(seq)
        if expected is not None and nbytes != expected:
            raise BlobError(f"the sequence's blob has {nbytes} bytes, expected {expected}: it lacks some of the positions")
        if not nbytes:
            raise LlamaCppError(f"libllama has no state of sequence {seq}")
        blob = self._room(nbytes)
        written = self._functions.get(blob.ctypes.data, nbytes, seq)
        if written != nbytes:
            raise LlamaCppError(f"libllama wrote {written} of {nbytes} bytes of state")
        return blob

    def _check_scratch(self) -> None:
        low, high = self._functions.span(self._scratch)
        if high >= 0:
            raise EngineError(
                f"scratch sequence {self._scratch} holds positions {low} to {high}; give the engine one that nobody else uses"
            )

    def _learn(self, probe: Callable[[int], object] | None) -> Geometry:
        self._check_scratch()
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
            geometry = learn(self._blob(seq), seq)
        except BlobError as error:
            raise LayoutError(f"{error}; {_UNSUPPORTED}") from error
        finally:
            if probe is not None:
                self._functions.remove(seq)
        if probe is None:
            self._try_scratch(geometry)
        self.release()
        return geometry

    def _try_scratch(self, geometry: Geometry) -> None:
        """See whether the scratch sequence can hold a cell; a probe has shown that by itself."""
        start = self._functions.span(self._seq)[0]
        self._functions.copy(self._seq, self._scratch, start, start + 1)
        try:
            frame = Frame(geometry, 1)
            frame.check(self._blob(self._scratch, frame.nbytes), self._scratch, start)
        except (BlobError, LlamaCppError) as error:
            raise LayoutError(f"a range cannot be copied to sequence {self._scratch} ({error}); {_UNSUPPORTED}") from error
        finally:
            self._functions.remove(self._scratch)


def _call(probe: Callable[[int], object], seq: int) -> None:
    try:
        probe(seq)
    except Exception as error:  # the caller's code may raise anything
        raise LayoutError(f"the probe could not evaluate a token in sequence {seq} ({error}); {_UNSUPPORTED}") from error


def _layout(geometry: Geometry, model: str, identity: Mapping[str, str | int]) -> Layout:
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
    return Layout(geometry.streams(), model=model, identity={**identity, **learned})
