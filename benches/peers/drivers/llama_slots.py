"""llama.cpp's slot files, and kvstore in their place: the real model in one context, driven through its C functions.

A slot file is what llama-server writes and reads for a slot's save and restore: `llama_state_seq_save_file` and `_load_file`.
There a client names it; here it is a file a session, found by comparing the tokens stored beside it.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benches.llamacpp import Context, Model, smollm2_path
from benches.peers.driver import Driver
from benches.peers.drivers.session_files import SessionDriver
from benches.peers.llama_state import Blob
from benches.peers.shape import Bytes, Shape, Tokens

__all__ = ["DRIVER"]


class Engine:
    """A context of the real model whose state can be set to, and read as, rows."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.model = Model(smollm2_path())
        self.context = Context(self.model, tokens + 256)
        self.c: Any = self.model.library.c
        for name, result, arguments in (
            ("llama_state_seq_get_size", c.c_size_t, [c.c_void_p, c.c_int32]),
            ("llama_state_seq_get_data", c.c_size_t, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32]),
            ("llama_state_seq_set_data", c.c_size_t, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32]),
            ("llama_state_seq_save_file", c.c_size_t, [c.c_void_p, c.c_char_p, c.c_int32, c.c_void_p, c.c_size_t]),
            (
                "llama_state_seq_load_file",
                c.c_size_t,
                [c.c_void_p, c.c_char_p, c.c_int32, c.c_void_p, c.c_size_t, c.POINTER(c.c_size_t)],
            ),
        ):
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        self.context.decode([0], 0)
        self.blob = Blob(shape, self.get())
        self.context.truncate(0)

    def get(self) -> Bytes:
        """The blob of the session's sequence."""
        blob = np.empty(self.c.llama_state_seq_get_size(self.context.pointer, 0), np.uint8)
        if self.c.llama_state_seq_get_data(self.context.pointer, blob.ctypes.data, blob.size, 0) != blob.size:
            raise OSError("llama.cpp did not hand out its state")
        return blob

    def put(self, arrays: Sequence[Bytes], tokens: int) -> None:
        """Let the sequence hold rows."""
        blob = self.blob.build(arrays, tokens)
        self.context.truncate(0)
        if self.c.llama_state_seq_set_data(self.context.pointer, blob.ctypes.data, blob.size, 0) != blob.size:
            raise OSError("llama.cpp did not take the rows")

    def close(self) -> None:
        """Free the model."""
        self.context.close()
        self.model.close()


class LlamaDriver(Driver):
    """What is saved from a context and restored into it; arrays are put into it before and taken out of it after, untimed."""

    own: ClassVar[str] = "a llama.cpp context"

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        super().__init__(shape, threads, **options)
        self.engine = Engine(shape, int(options["context"]))

    def before_save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        """See `Driver.before_save`."""
        self.engine.put(arrays, len(tokens))

    def before_restore(self) -> None:
        """See `Driver.before_restore`."""
        self.engine.context.truncate(0)

    def deliver(self, arrays: Sequence[Bytes], length: int) -> None:
        """See `Driver.deliver`."""
        if length:
            self.engine.blob.take(self.engine.get(), arrays, length)


class _Slots(LlamaDriver, SessionDriver):
    durable: ClassVar[bool] = False
    suffix: ClassVar[str] = ".slot"

    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        raise NotImplementedError

    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        raise NotImplementedError

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        superseded = [path for path, shared, whole in self._alike(tokens) if whole and shared < len(tokens)]
        path = self.directory / f"{self.name(tokens)}{self.suffix}"
        ids = np.ascontiguousarray(tokens, np.int32)
        if not self.engine.c.llama_state_seq_save_file(
            self.engine.context.pointer, str(path).encode(), 0, ids.ctypes.data, ids.size
        ):
            raise OSError("llama.cpp did not write the slot file")
        path.with_suffix(".tokens").write_bytes(tokens.tobytes())
        for old in superseded:
            old.with_suffix(".tokens").unlink()
            old.unlink()

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        path, length = self.best(tokens)
        if path is None:
            return 0
        room = np.empty(self.engine.context.model.n_ctx_train * 4, np.int32)
        count = c.c_size_t()
        taken = self.engine.c.llama_state_seq_load_file(
            self.engine.context.pointer, str(path).encode(), 0, room.ctypes.data, room.size, c.byref(count)
        )
        if not taken:
            raise OSError("llama.cpp refused the slot file")
        if length < count.value:
            self.engine.context.truncate(length)
        return length


DRIVER = _Slots
