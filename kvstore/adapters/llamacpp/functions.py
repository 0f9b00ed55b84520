"""The functions of libllama that saving and restoring takes, with prototypes of our own.

The prototypes are made from the functions' addresses. Setting `argtypes` on the caller's library object would change them
for everybody who shares it, llama-cpp-python's own declarations included.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from kvstore.adapters.llamacpp.errors import LlamaCppError

__all__ = ["ALL", "PARTIAL", "Functions"]

ALL = -1  # as a position: from the first, or to the last
PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: only what is valid at one position, a window or recurrent state

# Sizes and positions as in llama.h: llama_seq_id and llama_pos are int32, flags uint32
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "llama_get_model": (c.c_void_p, c.c_void_p),
    "llama_model_n_swa": (c.c_int32, c.c_void_p),
    "llama_get_memory": (c.c_void_p, c.c_void_p),
    "llama_memory_seq_cp": (None, c.c_void_p, c.c_int32, c.c_int32, c.c_int32, c.c_int32),
    "llama_memory_seq_rm": (c.c_bool, c.c_void_p, c.c_int32, c.c_int32, c.c_int32),
    "llama_memory_seq_pos_min": (c.c_int32, c.c_void_p, c.c_int32),
    "llama_memory_seq_pos_max": (c.c_int32, c.c_void_p, c.c_int32),
    "llama_state_seq_get_size_ext": (c.c_size_t, c.c_void_p, c.c_int32, c.c_uint32),
    "llama_state_seq_get_data_ext": (c.c_size_t, c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32, c.c_uint32),
    "llama_state_seq_set_data_ext": (c.c_size_t, c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32, c.c_uint32),
}


def _bind(library: object, name: str) -> Callable[..., Any]:
    try:
        address = c.cast(getattr(library, name), c.c_void_p).value
    except (AttributeError, TypeError, c.ArgumentError) as error:
        raise LlamaCppError(
            f"the library has no C function {name} ({error}); pass the ctypes library of a llama.cpp of 2025 or later"
        ) from None
    if not address:
        raise LlamaCppError(f"the library's {name} is a null pointer")
    result, *arguments = _PROTOTYPES[name]
    return c.CFUNCTYPE(result, *arguments)(address)


class Functions:
    """The functions, bound to one context. The context must outlive this; nothing here owns it.

    Parameters
    ----------
    library : ctypes library
        Anything with the functions as attributes: `ctypes.CDLL`, or the module `llama_cpp`.
    context : int or c_void_p
        The address of the `llama_context`.

    Attributes
    ----------
    window_cells : int
        Positions of the model's sliding window; 0 if it has none.
    """

    def __init__(self, library: object, context: int | c.c_void_p) -> None:
        pointer = context.value if isinstance(context, c.c_void_p) else context
        if isinstance(pointer, bool) or not isinstance(pointer, int) or pointer == 0:
            raise LlamaCppError(f"expected the address of a llama_context, got {context!r}")
        self._library = library  # holds the code that the addresses point to
        self._context = pointer
        bound = {name: _bind(library, name) for name in _PROTOTYPES}
        self._cp, self._rm = bound["llama_memory_seq_cp"], bound["llama_memory_seq_rm"]
        self._min, self._max = bound["llama_memory_seq_pos_min"], bound["llama_memory_seq_pos_max"]
        self._size = bound["llama_state_seq_get_size_ext"]
        self._get, self._set = bound["llama_state_seq_get_data_ext"], bound["llama_state_seq_set_data_ext"]
        self.window_cells = int(bound["llama_model_n_swa"](bound["llama_get_model"](pointer)))
        self._memory: int | None = bound["llama_get_memory"](pointer)
        if not self._memory:
            raise LlamaCppError("the context has no memory (an encoder or an embedding model); there is no state to keep")

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Let `target` hold the cells [start, stop) of `source`, too. Both must share one stream of cells (see `geometry`)."""
        self._cp(self._memory, source, target, start, stop)

    def remove(self, seq: int, start: int = ALL, stop: int = ALL) -> None:
        """Take cells away from a sequence; raise LlamaCppError when its memory can't be cut there."""
        if not self._rm(self._memory, seq, start, stop):
            raise LlamaCppError(f"libllama refused to remove [{start}, {stop}) of sequence {seq}")

    def clear(self, seq: int) -> bool:
        """Take all cells away from a sequence; False when libllama refuses, as contexts with recurrent layers do without it."""
        return bool(self._rm(self._memory, seq, ALL, ALL))

    def span(self, seq: int) -> tuple[int, int]:
        """First and last position of a sequence; (-1, -1) when it is empty."""
        return int(self._min(self._memory, seq)), int(self._max(self._memory, seq))

    def size(self, seq: int, flags: int = 0) -> int:
        """Bytes of a sequence's blob."""
        return int(self._size(self._context, seq, flags))

    def get(self, address: int, nbytes: int, seq: int, flags: int = 0) -> int:
        """Write a sequence's blob to memory; return the bytes written, 0 when refused."""
        return int(self._get(self._context, address, nbytes, seq, flags))

    def set(self, address: int, nbytes: int, seq: int, flags: int = 0) -> int:
        """Read a sequence's blob from memory; return the bytes read. On a refusal (0) the sequence may be wiped already."""
        return int(self._set(self._context, address, nbytes, seq, flags))
