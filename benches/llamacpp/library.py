"""The shared library inside xllamacpp's wheel, refused by name when it is not the pinned build."""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections import deque
from importlib import metadata
from pathlib import Path
from typing import Any

from benches.llamacpp.structs import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    SIZES,
    Batch,
    ContextParams,
    ModelParams,
    differing,
)

__all__ = ["BUILD", "DriverError", "Library", "WrongBuildError"]

PACKAGE = "xllamacpp"
VERSION = "2026.10.11549"
BUILD = f"{PACKAGE}-{VERSION}"
_GGML_VERSION = "0.26.0"
_LOG_LINES = 8
_WARN, _ERROR = 3, 4

_LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)

# name: (result, arguments). Only what the driver calls; the adapter makes prototypes of its own.
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LogCallback, c.c_void_p]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, ModelParams]),
    "llama_model_free": (None, [c.c_void_p]),
    "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
    "llama_model_n_ctx_train": (c.c_int32, [c.c_void_p]),
    "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
    "llama_vocab_is_eog": (c.c_bool, [c.c_void_p, c.c_int32]),
    "llama_tokenize": (
        c.c_int32,
        [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
    ),
    "llama_detokenize": (
        c.c_int32,
        [c.c_void_p, c.POINTER(c.c_int32), c.c_int32, c.c_char_p, c.c_int32, c.c_bool, c.c_bool],
    ),
    "llama_init_from_model": (c.c_void_p, [c.c_void_p, ContextParams]),
    "llama_free": (None, [c.c_void_p]),
    "llama_batch_init": (Batch, [c.c_int32, c.c_int32, c.c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
    "llama_get_logits_ith": (c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
    "llama_get_memory": (c.c_void_p, [c.c_void_p]),
    "llama_memory_seq_rm": (c.c_bool, [c.c_void_p, c.c_int32, c.c_int32, c.c_int32]),
    "llama_memory_seq_pos_max": (c.c_int32, [c.c_void_p, c.c_int32]),
    "ggml_version": (c.c_char_p, []),
}


class DriverError(RuntimeError):
    """llama.cpp refused something; its own last words are in the message."""


class WrongBuildError(DriverError, ImportError):
    """The installed llama.cpp is not the build that the structs are pinned to."""


def _wrong(what: str) -> WrongBuildError:
    return WrongBuildError(f"{what}; the driver's structs are pinned to {BUILD}: pip install {PACKAGE}=={VERSION}")


def _find() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # finds the folder without importing its extension module
    if spec is None or not spec.submodule_search_locations:
        raise _wrong(f"{PACKAGE} is not installed")
    path = Path(spec.submodule_search_locations[0]) / f"{PACKAGE}.abi3.so"
    if not path.is_file():
        raise _wrong(f"{PACKAGE} has no {path.name}")
    return path


class Library:
    """libllama, loaded once a process; every call of the driver goes through `c`.

    Attributes
    ----------
    c : ctypes.CDLL
        The library with prototypes set. Hand it to the adapter as it is.
    """

    _loaded: Library | None = None

    def __init__(self, path: Path, *, version: str) -> None:
        if version != VERSION:
            raise _wrong(f"found {PACKAGE} {version}")
        self.c = c.CDLL(str(path))
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(self.c, name)
            except AttributeError:
                raise _wrong(f"{path.name} exports no {name}") from None
            function.restype, function.argtypes = result, arguments
        self._check()
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._callback = _LogCallback(self._keep)  # held here: the library calls it for as long as it lives
        self.c.llama_log_set(self._callback, None)
        self.c.llama_backend_init()

    @classmethod
    def load(cls) -> Library:
        """Load the library of the installed wheel, or return the one that this process has.

        Raises
        ------
        WrongBuildError
            When it is missing or is not the pinned build; says what to install.
        """
        if cls._loaded is None:
            path = _find()
            try:
                version = metadata.version(PACKAGE)
            except metadata.PackageNotFoundError:
                raise _wrong(f"{PACKAGE} has no version") from None
            cls._loaded = cls(path, version=version)
        return cls._loaded

    def _check(self) -> None:
        sizes = {kind.__name__: c.sizeof(kind) for kind, size in SIZES.items() if c.sizeof(kind) != size}
        if sizes:
            raise _wrong(f"this platform lays the structs out differently ({sizes})")
        ggml = (self.c.ggml_version() or b"").decode(errors="replace")
        if ggml != _GGML_VERSION:
            raise _wrong(f"found ggml {ggml}, expected {_GGML_VERSION}")
        wrong = differing(self.c.llama_model_default_params(), MODEL_DEFAULTS)
        wrong += differing(self.c.llama_context_default_params(), CONTEXT_DEFAULTS)
        if wrong:
            raise _wrong(f"the library's defaults differ in {', '.join(wrong)}")

    def _keep(self, level: int, text: bytes | None, _: object) -> None:
        if text and level in (_WARN, _ERROR):
            self._log.append(text.decode(errors="replace").strip())

    def error(self, what: str) -> DriverError:
        """Make an error out of what failed and the last warnings that llama.cpp logged."""
        return DriverError(f"{what}: {' | '.join(self._log) or 'llama.cpp logged nothing'}")
