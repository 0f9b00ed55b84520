"""Blocks of a damaged file: read, and taken only if every check that there is says that they are what they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore import ids
from kvstore.blocks import PreparedBlock
from kvstore.env.damaged import DamagedFile
from kvstore.kernel import crc32c
from kvstore.records.block import BlockHeader, header_bytes
from kvstore.records.constants import KIND_ROWS, KIND_STATES
from kvstore.records.states import max_packed_bytes
from kvstore.repair.records import Space
from kvstore.repair.scan import Found
from kvstore.staging import BufferPool

__all__ = ["BlockReader"]


class BlockReader:
    """Reads blocks of the damaged file, as values that can be put into a store. For one thread; hashes on several.

    Parameters
    ----------
    pool : BufferPool
        Where the values' buffers come from. The caller gives them back.
    value_bytes : callable
        How long the value of a block has to be.

    Attributes
    ----------
    read_bytes : int
        Payload read so far.
    kept, lost : set of bytes
        Blocks that were handed out, and those that were asked for and of which there is no whole copy.
    """

    def __init__(
        self,
        file: DamagedFile,
        found: Found,
        pool: BufferPool,
        value_bytes: Callable[[Space, BlockHeader], int],
        threads: int = 4,
    ) -> None:
        self.pool = pool
        self._file = file
        self._found = found
        self._value_bytes = value_bytes
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-repair")
        self.read_bytes = 0
        self.kept: set[bytes] = set()
        self.lost: set[bytes] = set()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def rows(self, space: Space, wanted: Sequence[tuple[bytes, int]]) -> list[PreparedBlock]:
        """Read blocks of rows (id, positions that it has to hold at least) up to the first that isn't whole."""
        return self._read(space, KIND_ROWS, wanted)

    def states(self, space: Space, wanted: Sequence[bytes]) -> list[PreparedBlock]:
        """As `rows`, for blocks of states."""
        return self._read(space, KIND_STATES, [(block_id, 0) for block_id in wanted])

    def _read(self, space: Space, kind: int, wanted: Sequence[tuple[bytes, int]]) -> list[PreparedBlock]:
        done = list(self._executor.map(lambda asked: self._block(space, kind, *asked), wanted))
        whole: list[PreparedBlock] = []
        for block, (block_id, _) in zip(done, wanted, strict=True):
            if block is None:
                self.lost.add(block_id)
        ended = False
        for block in done:
            ended = ended or block is None
            if block is not None and ended:
                self.pool.give(block.value)
            elif block is not None:
                whole.append(block)
                self.kept.add(block.block_id)
                self.read_bytes += block.header.payload_bytes
        return whole

    def _block(self, space: Space, kind: int, block_id: bytes, tokens: int) -> PreparedBlock | None:
        for place in self._found.blocks.get(block_id, ()):
            header = place.header
            if self._fits(space, header, kind, tokens):
                block = self._load(space, header, place.payload)
                if block is not None:
                    return block
        return None

    @staticmethod
    def _fits(space: Space, header: BlockHeader, kind: int, tokens: int) -> bool:
        """Whether a header is that of such a block of the namespace, so that its length may be believed."""
        layout = space.layout
        if header.namespace != space.namespace or header.kind != kind:
            return False
        if kind == KIND_STATES:
            return len(header.sums) == 1 and header.tokens == 0 and 0 < header.payload_bytes <= max_packed_bytes(layout)
        return (
            len(header.sums) == len(layout.streams)
            and tokens <= header.tokens <= layout.block_tokens
            and header.payload_bytes == layout.payload_bytes(header.tokens)
        )

    def _load(self, space: Space, header: BlockHeader, at: int) -> PreparedBlock | None:
        padded = header_bytes(len(header.sums))
        value = self.pool.take(self._value_bytes(space, header))
        encoded = header.encode()
        value[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        value[len(encoded) : padded] = 0
        value[padded + header.payload_bytes :] = 0
        block = PreparedBlock(header, value)
        if self._file.read_into(at, block.payload.data) == header.payload_bytes and _whole(space, block):
            return block
        self.pool.give(value)
        return None


def _whole(space: Space, block: PreparedBlock) -> bool:
    """Whether a payload hashes to its block's id in the namespace's domain, and every checksum in its header is right."""
    header, payload, layout = block.header, block.payload, space.layout
    if ids.block_id(space.domain, header.kind, header.tokens, payload.data) != header.block_id:
        return False
    parts = [payload]
    if header.kind == KIND_ROWS:
        offsets = layout.segments(header.tokens)
        parts = [payload[o : o + s.rows(header.tokens) * s.row_bytes] for o, s in zip(offsets, layout.streams, strict=False)]
    return [crc32c(part) for part in parts] == header.sums.tolist()
