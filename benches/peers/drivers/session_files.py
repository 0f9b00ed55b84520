"""What drivers with one file a session share: the tokens beside it, by which the session that begins alike is found."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benches.peers.driver import Driver
from benches.peers.shape import Bytes, Tokens

__all__ = ["SessionDriver", "write_durably"]


class SessionDriver(Driver):
    """A file for each session, rewritten by each turn, with its tokens in another one.

    All stored tokens are compared with a prompt, so that a session that begins alike serves as far as it goes: more than most who
    write this in an afternoon do.
    """

    durable: ClassVar[bool] = True
    suffix: ClassVar[str] = ""

    def open(self, directory: Path, tokens: int) -> None:
        """See `Driver.open`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def close(self) -> None:
        """See `Driver.close`: nothing is kept open."""

    @abstractmethod
    def write(self, path: Path, arrays: Sequence[Bytes]) -> None:
        """Write a session to a file, durably."""

    @abstractmethod
    def read(self, path: Path, arrays: Sequence[Bytes], length: int) -> None:
        """Read the first `length` rows of each stream."""

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        """See `Driver.save`."""
        # a session is known by how it begins: a later turn replaces the file of the one before it
        superseded = [path for path, shared, whole in self._alike(tokens) if whole and shared <= len(tokens)]
        path = self.directory / f"{self.name(tokens)}{self.suffix}"
        self.write(path, arrays)
        write_durably(path.with_suffix(".tokens"), [np.ascontiguousarray(tokens).view(np.uint8)])
        for old in superseded:
            if old != path:
                old.with_suffix(".tokens").unlink()
                old.unlink()
        sync_directory(self.directory)

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        """See `Driver.restore`."""
        path, length = self.best(tokens)
        if path is not None:
            self.read(path, arrays, length)
        return length

    def name(self, tokens: Tokens) -> str:
        """Of a session's files."""
        return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()

    def best(self, tokens: Tokens) -> tuple[Path | None, int]:
        """The session that begins alike for longest, and how long."""
        found = [(path, shared) for path, shared, _ in self._alike(tokens) if shared]
        return max(found, key=lambda one: one[1], default=(None, 0))

    def _alike(self, tokens: Tokens) -> list[tuple[Path, int, bool]]:
        """Each stored session: how many tokens it begins alike, and whether that is all of it."""
        found = []
        for beside in self.directory.glob("*.tokens"):
            stored = np.fromfile(beside, np.uint32)
            both = min(len(stored), len(tokens))
            differ = np.flatnonzero(stored[:both] != tokens[:both])
            shared = int(differ[0]) if differ.size else both
            found.append((beside.with_suffix(self.suffix), shared, shared == len(stored)))
        return found


def write_durably(path: Path, parts: Sequence[Bytes]) -> None:
    """Write a file under another name, make it durable, and give it its own."""
    partial = path.with_suffix(path.suffix + ".tmp")
    with partial.open("wb", buffering=0) as file:
        for part in parts:
            view = part.reshape(-1).data
            while view:
                view = view[file.write(view) or 0 :]
        os.fdatasync(file.fileno())
    partial.replace(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
