"""The blocks of a lease and the views made from them: made when asked for, and holding the lease's bytes in place."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvstore import Store
from kvstore.errors import LeaseClosedError
from kvstore.leases import LeasedBlock
from kvstore.testing import session_rows
from tests.support import plain_layout, save

TOKENS = list(range(100))


def test_blocks_are_a_sequence(store: Store) -> None:
    """The blocks can be counted, indexed from both ends, cut and iterated, and an index that there isn't is an IndexError."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        blocks = lease.blocks
        assert isinstance(blocks, Sequence)
        assert len(blocks) == len(list(blocks)) == 7
        starts = [block.start for block in blocks]
        assert starts == list(range(0, 100, 16))
        assert [blocks[i].start for i in range(-7, 7)] == starts * 2
        assert [block.start for block in blocks[-3:]] == starts[-3:]
        assert [block.start for block in reversed(blocks)] == starts[::-1]
        assert [block.tokens for block in blocks] == [16] * 6 + [4]
        assert len({block.block_id for block in blocks}) == 7
        for index in (7, -8):
            with pytest.raises(IndexError):
                blocks[index]


def test_a_payload_is_the_bytes_of_its_block(store: Store) -> None:
    """Each payload is a read-only array of exactly its block's bytes, whichever way the block was come by."""
    layout = plain_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    rows = session_rows(layout, TOKENS)["v"]
    place = [stream.name for stream in layout.streams].index("v")
    with namespace.lease(TOKENS) as lease:
        for index, block in enumerate(lease.blocks):
            payload = block.payload
            assert payload.dtype == np.uint8
            assert (payload.shape, payload.flags.writeable) == ((block.payload_bytes,), False)
            assert payload.tobytes() == lease.blocks[index].payload.tobytes()
            start = layout.segments(block.held_tokens)[place]
            expected = rows[block.start : block.start + block.tokens].tobytes()
            assert payload[start : start + len(expected)].tobytes() == expected


def test_the_last_view_ends_the_transaction(store: Store) -> None:
    """The transaction ends with the last of many views, in whatever order they go; what is made from one counts as well."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        payloads = [block.payload for block in lease.blocks]
    derived = payloads[3][5:9].reshape(2, 2)
    expected = derived.tobytes()
    while payloads:
        payloads.pop(len(payloads) // 2)
        gc.collect()
        assert store.stats().readers_pinning
    assert derived.tobytes() == expected
    del derived
    gc.collect()
    assert not store.stats().readers_pinning


def test_views_again_after_the_last_one_has_gone(store: Store) -> None:
    """When all views of a lease have died it can be closed, or give new ones, which hold it again."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    lease = namespace.lease(TOKENS)
    for _ in range(3):
        view = lease.blocks[1].payload
        with pytest.raises(BufferError, match="views"):
            lease.close()
        del view
    again = lease.blocks[1].payload.copy()
    lease.close()
    assert not store.stats().readers_pinning
    assert again.size
    assert again.base is None


def test_blocks_keep_the_lease(store: Store) -> None:
    """Blocks keep a lease that is forgotten alive; the last reference to them ends it, without a garbage collection."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    gc.disable()
    try:
        blocks = namespace.lease(TOKENS).blocks
        assert store.stats().readers_pinning
        block = blocks[2]
        del blocks
        assert block.payload.size
        del block
        assert not store.stats().readers_pinning
    finally:
        gc.enable()


def look(blocks: Sequence[LeasedBlock], expected: list[bytes], wrong: list[object], ready: threading.Barrier) -> None:
    """Make views of all blocks and drop them, until the lease has ended; note what isn't as it should be."""
    ready.wait()
    try:
        for _ in range(200):
            wrong += [block for block, right in zip(blocks, expected, strict=True) if block.payload.tobytes() != right]
    except LeaseClosedError:
        pass
    except BaseException as error:
        wrong.append(error)


def test_views_from_many_threads(store: Store) -> None:
    """Threads that make and drop views while a lease ends get the right bytes or LeaseClosedError, and nothing is pinned after."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    for _ in range(20):
        lease = namespace.lease(TOKENS)
        blocks = list(lease.blocks)
        wrong: list[object] = []
        ready = threading.Barrier(5)
        given = (blocks, [block.payload.tobytes() for block in blocks], wrong, ready)
        threads = [threading.Thread(target=look, args=given) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        lease.__exit__(None, None, None)
        for thread in threads:
            thread.join()
        assert not wrong
        assert not store.stats().readers_pinning
