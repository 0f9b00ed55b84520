"""kvstore itself, as a server uses it. The only driver that imports kvstore, and it runs in the project's own Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benches.peers.driver import Driver
from benches.peers.shape import Bytes, Shape, Tokens
from kvstore import Layout, Store, Stream
from kvstore.errors import BlockDamaged

__all__ = ["DRIVER"]


class _KVStore(Driver):
    durable: ClassVar[bool] = True
    own: ClassVar[str] = "the engine's arrays, every byte checked"

    def __init__(self, shape: Shape, threads: int, **options: Any) -> None:
        super().__init__(shape, threads, **options)
        streams = tuple(Stream(f"s{i}", "u8", (shape.row_bytes,)) for i in range(shape.streams))
        self.layout = Layout(streams=streams, model="peers")
        self.store: Store | None = None

    def open(self, directory: Path, tokens: int) -> None:
        cap = 4 * tokens * self.shape.token_bytes + (64 << 20)
        new = not (directory / "data.mdb").exists()
        self.store = Store.open(directory, max_bytes=cap if new else None)
        self.namespace = self.store.namespace(self.layout)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _named(self, arrays: Sequence[Bytes]) -> dict[str, np.ndarray[Any, Any]]:
        return {f"s{i}": array for i, array in enumerate(arrays)}

    def save(self, tokens: Tokens, arrays: Sequence[Bytes]) -> None:
        self.namespace.save(tokens, self._named(arrays))

    def restore(self, tokens: Tokens, arrays: Sequence[Bytes]) -> int:
        # as promote does: what is damaged is refused from then on, and what comes before it is restored
        while True:
            try:
                with self.namespace.lease(tokens) as lease:
                    if lease:
                        lease.copy_into(self._named(arrays), threads=self.threads)
                    return lease.length
            except BlockDamaged:
                continue


DRIVER = _KVStore
