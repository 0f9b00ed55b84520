"""What a driver is, and what drivers share: copying with threads, chunks and their keys. Runs in the peers' Python."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benches.peers.shape import Bytes, Shape, Tokens

__all__ = ["ChunkDriver", "Driver", "aligned", "files_of", "fsync_all"]

_PIECE = 1 << 20  # bytes of a copy that one thread makes at once
ALIGNMENT = 4096


class Driver(ABC):
    """A peer in one process.

    Parameters
    ----------
    shape : Shape
        What sessions consist of.
    threads : int
        To copy with, to read and to write with, wherever the peer can be told so.

    Attributes
    ----------
    durable : bool
        Whether `save` returns only when the bytes are on the disk.
    reopens : bool
        Whether what was saved is found again after `close` and `open`; else the runner keeps it open.
    own : str
        Where the peer itself delivers bytes.
    aside : float
        Seconds of the last `save` or `restore` that went into gathering rows into the peer's buffers, or scattering them out of
        these.
    """

    durable: ClassVar[bool] = False
    reopens: ClassVar[bool] = True
    own: ClassVar[str] = "the engine's arrays"

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        self.shape = shape
        self.threads = threads
        self.options = options
        self.aside = 0.0
        self.pool = ThreadPoolExecutor(threads)

    @abstractmethod
    def open(self, directory: Path, tokens: int) -> None:
        """Open or create what is in a directory. `tokens`: how many a session may have at most."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        """Save a session, of which a beginning may be stored already."""

    @abstractmethod
    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        """Restore the longest beginning that can be had into the arrays; return its length, 0 when there is none.

        An error is raised when the peer notices damage and does not go on by itself.
        """

    def before_save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:  # noqa: B027 (most have nothing to do)
        """Bring the session to where it is saved from, if that isn't the arrays. Not timed."""

    def before_restore(self) -> None:  # noqa: B027 (as above)
        """Clear what is restored into. Not timed."""

    def after_restore(self) -> None:  # noqa: B027 (as above)
        """Put back what a restore took away. Not timed."""

    def deliver(self, arrays: Sequence[Bytes], length: int) -> None:  # noqa: B027 (as above)
        """Bring what was restored into the arrays, if it isn't there. Not timed."""

    def settle(self) -> None:
        """Wait until what was saved is in files, where that goes on in the background. It isn't timed as a save."""
        return

    def run(self, work: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Do something with every item, on the threads."""
        for _ in self.pool.map(work, items):
            pass

    def copy(self, pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
        """Copy (destination, source) pairs of equal shape on the threads, cut into even pieces."""
        work: list[tuple[Bytes, Bytes]] = []
        for to, source in pairs:
            step = max(1, _PIECE // max(1, to[0].nbytes)) if len(to) else 1
            work += [(to[i : i + step], source[i : i + step]) for i in range(0, len(to), step)]
        self.run(lambda pair: np.copyto(pair[0], pair[1]), work)


class ChunkDriver(Driver):
    """A peer that keeps chunks of a fixed number of tokens by key; a chunk's key stands for all tokens up to its end.

    A chunk holds stream after stream, each with its rows. Only whole chunks are kept, as the servers do it that use such peers.
    """

    chunk_tokens: ClassVar[int] = 256
    own: ClassVar[str] = "chunk buffers"

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        super().__init__(shape, threads, **options)
        self.chunk_tokens_used = int(options.get("chunk_tokens", self.chunk_tokens))
        self.chunk_bytes = self.chunk_tokens_used * shape.token_bytes
        self.buffers: list[Bytes] = []

    @abstractmethod
    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        """Store chunks."""

    @abstractmethod
    def count(self, keys: Sequence[str]) -> int:
        """How many leading keys are stored."""

    @abstractmethod
    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        """Read chunks into the buffers; return how many leading ones came."""

    def keys(self, tokens: Tokens) -> list[str]:
        """A key for each whole chunk."""
        keys, key = [], b""
        for stop in range(self.chunk_tokens_used, len(tokens) + 1, self.chunk_tokens_used):
            key = hashlib.blake2b(key + tokens[stop - self.chunk_tokens_used : stop].tobytes(), digest_size=32).digest()
            keys.append(key.hex())
        return keys

    def reserve(self, tokens: int) -> Bytes:
        """Make the buffers: one for each chunk of the longest session, page-aligned, touched."""
        count = tokens // self.chunk_tokens_used
        memory = aligned(count * self.chunk_bytes)
        self.buffers = [memory[i * self.chunk_bytes : (i + 1) * self.chunk_bytes] for i in range(count)]
        return memory

    def cut(self, buffer: Bytes) -> Bytes:
        """A chunk's buffer by stream, row and byte."""
        return buffer.reshape(self.shape.streams, self.chunk_tokens_used, self.shape.row_bytes)

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        """See `Driver.save`."""
        keys = self.keys(tokens)
        have = self.count(keys)
        new = range(have, len(keys))
        start = time.perf_counter()
        size = self.chunk_tokens_used
        self.copy((self.cut(self.buffers[i])[s], array[i * size : (i + 1) * size]) for i in new for s, array in enumerate(arrays))
        self.aside = time.perf_counter() - start
        if new:
            self.put([keys[i] for i in new], [self.buffers[i] for i in new])

    def fetch(self, tokens: Tokens) -> int:
        """Read what can be had of a prompt into the buffers; return for how many tokens."""
        keys = self.keys(tokens)
        keys = keys[: self.count(keys)]
        return self.get(keys, self.buffers[: len(keys)]) * self.chunk_tokens_used if keys else 0

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        """See `Driver.restore`: fetch, then scatter."""
        length = self.fetch(tokens)
        size = self.chunk_tokens_used
        start = time.perf_counter()
        self.copy(
            (array[i * size : (i + 1) * size], self.cut(self.buffers[i])[s])
            for i in range(length // size)
            for s, array in enumerate(arrays)
        )
        self.aside = time.perf_counter() - start
        return length


def aligned(size: int) -> Bytes:
    """Memory from the beginning of a page on, touched."""
    memory = np.ones(size + ALIGNMENT, np.uint8)
    skip = -int(memory.__array_interface__["data"][0]) % ALIGNMENT
    return memory[skip : skip + size]


def files_of(directory: Path) -> list[Path]:
    """All files below a directory."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def fsync_all(directory: Path) -> None:
    """Make everything below a directory durable."""
    for path in files_of(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
