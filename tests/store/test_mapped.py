"""Mapped buffers: a lease's blocks as one run of memory, bit-exact, private, kept in place, replaced in place."""

from __future__ import annotations

import gc
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Layout, Mapped, Namespace, State, Store
from kvstore.errors import ArrayError, BlockDamaged, LeaseClosedError, MappingError, SpacePinned, StoreFullError, ViewsAliveError
from kvstore.leases.mapped import map_blocks
from kvstore.testing import session_rows
from tests.support import (
    CAP,
    assert_restores,
    assert_sound,
    child_at,
    data_file,
    flip,
    hybrid_layout,
    plain_layout,
    run_child,
    save,
    wide_layout,
)

TOKENS = list(range(100))


def expected(layout: Layout, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Build the whole of a mapped buffer by the book: rows at their places in a full block, zeros everywhere else."""
    size = layout.block_tokens
    segments = layout.segments(size)
    stride = -(-segments[-1] // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.zeros((-(-len(tokens) // size), stride), np.uint8)
    for start, stream in zip(segments, layout.streams, strict=False):
        rows = session_rows(layout, tokens)[stream.name]
        for index, page in enumerate(pages):
            first, last = (stream.rows(min(position, len(tokens))) for position in (index * size, (index + 1) * size))
            block = np.zeros(stream.array_shape(size), stream.view_dtype)
            place = (slice(None),) * stream.token_axis
            block[(*place, slice(0, last - first))] = rows[(*place, slice(first, last))]
            page[start : start + block.nbytes] = np.frombuffer(block.tobytes(), np.uint8)
    return pages.reshape(-1)


def mapped(namespace: Namespace, tokens: list[int], **limit: int) -> Mapped:
    """Map a lease that ends at once."""
    with namespace.lease(tokens, **limit) as lease:
        return lease.map()


LAYOUTS = {
    "plain": plain_layout(),
    "hybrid": hybrid_layout(),
    "wide": wide_layout(),
    "narrow": wide_layout(3, 16),
    "pages": wide_layout(256, 16),  # a payload of exactly one page
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 31, 32, 63, 64, 65, 96, 99, 100, 128, 256, 1000])
def test_every_byte_is_as_saved(store: Store, name: str, length: int) -> None:
    """Pages hold exactly the rows of the lease at their places and zeros elsewhere, for tails, one block and many."""
    layout = LAYOUTS[name]
    namespace = store.namespace(layout)
    tokens = list(range(length))
    save(namespace, tokens)
    whole = expected(layout, tokens)
    rows = session_rows(layout, tokens)
    buffer = mapped(namespace, tokens)
    for _ in range(2):
        assert (buffer.length, buffer.blocks, buffer.stride * buffer.blocks) == (
            length,
            -(-length // layout.block_tokens),
            whole.size,
        )
        assert buffer.array.tobytes() == whole.tobytes()
        assert buffer.array.flags.writeable
        assert buffer.array.flags.c_contiguous
        payload = layout.payload_bytes(layout.block_tokens)
        for index in range(buffer.blocks):
            assert buffer.block(index).tobytes() == whole[index * buffer.stride :][:payload].tobytes()
        for stream in layout.streams:
            parts = [buffer.stream(stream.name, index) for index in range(buffer.blocks)]
            assert np.concatenate(parts, axis=stream.token_axis).tobytes() == rows[stream.name].tobytes()
            pages = buffer.stream_pages(stream.name)
            assert pages.shape == (buffer.blocks, *stream.array_shape(layout.block_tokens))
            assert pages.dtype == stream.view_dtype
            for index, part in enumerate(parts):
                place = (slice(None),) * stream.token_axis
                assert part.tobytes() == pages[index][(*place, slice(0, part.shape[stream.token_axis]))].tobytes()
                assert part.flags.writeable
                if part.size:
                    assert np.shares_memory(part, pages)
                    assert np.shares_memory(part, buffer.array)
        buffer.detach()


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 33, 47])
def test_nothing_of_a_longer_session_is_in_it(store: Store, limit: int) -> None:
    """Where a lease ends inside a block that holds more rows, or a branch, those are not in the buffer."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    save(namespace, [*TOKENS[:20], *[7] * 40])
    assert mapped(namespace, TOKENS, limit=limit).array.tobytes() == expected(plain_layout(), TOKENS[:limit]).tobytes()
    other = [*TOKENS[:20], *[7] * 30]
    assert mapped(namespace, other).array.tobytes() == expected(plain_layout(), other).tobytes()


def test_whole_blocks_are_the_files_pages(store: Store) -> None:
    """A change in the file under a whole block shows in the buffer: nothing was copied; the part of a last block was."""
    namespace = store.namespace(wide_layout(256, 16))
    save(namespace, TOKENS[:40])
    with namespace.lease(TOKENS) as lease:
        buffer = lease.map()
        offsets = [block.file_offset for block in lease.blocks]
    before = buffer.array.copy()
    for offset in offsets:
        flip(data_file(store.path), offset + 5)
    changed = np.flatnonzero(buffer.array != before).tolist()
    for offset in offsets:
        flip(data_file(store.path), offset + 5)
    assert changed == [5, buffer.stride + 5]
    assert np.array_equal(buffer.array, before)


def test_writes_are_private(store: Store) -> None:
    """What is written to a buffer reaches no view, no other buffer, no other process and not the file."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    content = data_file(store.path).read_bytes()
    code = """
    with Store.open(path) as store, store.namespace(plain_layout()).lease(list(range(100))) as lease:
        lease.validate()
        buffer = lease.map()
        import zlib
        print(zlib.crc32(buffer.array), buffer.blocks)
    """
    with namespace.lease(TOKENS) as lease, lease.map() as buffer, lease.map() as untouched:
        buffer.array[:] = 0xEE
        buffer.stream("k", 2)[...] = 1
        buffer.stream_pages("v")[3, 4] = 2
        assert (buffer.stream_pages("k")[2] == 1).all()
        assert (buffer.stream("v", 3)[4] == 2).all()
        assert data_file(store.path).read_bytes() == content
        rows = session_rows(plain_layout(), TOKENS)
        assert np.concatenate(lease.views("v")).tobytes() == rows["v"].tobytes()
        lease.validate()
        assert untouched.array.tobytes() == expected(plain_layout(), TOKENS).tobytes()
        assert run_child(code, store.path) == f"{zlib.crc32(expected(plain_layout(), TOKENS).data)} 7"
    assert_restores(namespace, TOKENS, 100)


def test_another_process_maps_the_same(path: Path) -> None:
    """Two processes that map a session see the same bytes, and one that goes takes nothing from the other."""
    code = """
    store = Store.open(path)
    with store.namespace(wide_layout()).lease(list(range(200))) as lease:
        buffer = lease.map()
    array = buffer.array
    array[7] ^= 0xFF
    print("mapped", flush=True)
    sys.stdin.readline()
    array[7] ^= 0xFF
    print(int(array.sum()), flush=True)
    sys.stdin.readline()
    """
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, list(range(200)))
        whole = expected(wide_layout(), list(range(200)))
        with child_at(code, path) as process:
            buffer = mapped(namespace, list(range(200)))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) == int(whole.sum())
            assert np.array_equal(buffer.array, whole)
        assert np.array_equal(buffer.array, whole)


def fill(namespace: Namespace, rounds: int, first: int) -> int:
    """Save session after session until the store refuses; return how many went through."""
    for n in range(rounds):
        try:
            save(namespace, [first + n, *range(255)])
        except StoreFullError:
            return n
    return rounds


def test_it_is_never_written_over(path: Path) -> None:
    """A buffer outlives its lease and its store, and keeps its bytes while all around it is evicted and written anew."""
    tokens = [1, *range(255)]
    whole = expected(wide_layout(), tokens)
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, tokens)
        buffer = mapped(namespace, tokens)
        namespace.evict()
        fill(namespace, 60, 1000)
        assert np.array_equal(buffer.array, whole)
    assert np.array_equal(buffer.array, whole)
    part = buffer.stream("kv", 2)[5:7]
    del buffer, store, namespace
    rows = session_rows(wide_layout(), tokens)["kv"]
    with Store.open(path) as again:  # in the same process, while a part of a buffer of the earlier handle lives
        fill(again.namespace(wide_layout()), 60, 2000)
        assert part.tobytes() == rows[2 * 64 + 5 : 2 * 64 + 7].tobytes()
        assert again.stats().readers_pinning
        del part
        assert not again.stats().readers_pinning
        assert fill(again.namespace(wide_layout()), 60, 3000) == 60
        assert_sound(again)


def test_a_detach_lets_the_pages_go(path: Path) -> None:
    """A save that a buffer's pin refuses succeeds once the buffer is detached; the buffer keeps its bytes, writes and addresses."""
    tokens = [1, *range(255)]
    whole = expected(wide_layout(), tokens)
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(wide_layout())
        save(namespace, tokens)
        fill(namespace, 5, 100)
        lease = namespace.lease(tokens)
        buffer = lease.map()
        array, rows, pages = buffer.array, buffer.stream("kv", 1), buffer.stream_pages("kv")
        address = array.ctypes.data
        with pytest.raises(ViewsAliveError):
            lease.close()
        array[123456] ^= 0x5A
        whole[123456] ^= 0x5A
        with lease:
            pass
        with pytest.raises(SpacePinned):
            for n in range(200):
                save(namespace, [5000 + n, *range(255)])
        before = buffer.detached
        buffer.detach()
        assert (before, buffer.detached) == (False, True)
        assert not store.stats().readers_pinning
        assert fill(namespace, 60, 6000) == 60
        namespace.evict()
        assert fill(namespace, 60, 7000) == 60
        assert array.ctypes.data == buffer.array.ctypes.data == address
        assert np.array_equal(array, whole)
        assert rows.tobytes() == whole[buffer.stride :][: 64 * 4096].tobytes()
        pages[0, 0, 0] ^= 0xFF
        assert array[0] == whole[0] ^ 0xFF
        buffer.detach()
        assert_sound(store)
    pages[0, 0, 0] ^= 0xFF
    del buffer
    assert np.array_equal(array, whole)


def test_a_lease_may_close_after_a_detach(store: Store) -> None:
    """A buffer that was detached is no view of its lease any more."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    lease = namespace.lease(TOKENS)
    buffer = lease.map()
    buffer.detach(threads=1)
    lease.close()
    assert buffer.array.tobytes() == expected(plain_layout(), TOKENS).tobytes()


def test_dropping_it_ends_the_pin_at_once(store: Store) -> None:
    """Nothing but reference counts decides when a dropped buffer lets the transaction go: no cycle waits for the collector."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    gc.disable()
    try:
        buffer = mapped(namespace, TOKENS)
        pages = buffer.stream_pages("k")[1:, 2]
        assert store.stats().readers_pinning
        del buffer
        assert store.stats().readers_pinning
        del pages
        assert not store.stats().readers_pinning
        with pytest.raises(ZeroDivisionError), mapped(namespace, TOKENS):
            raise ZeroDivisionError
        assert not store.stats().readers_pinning
    finally:
        gc.enable()


def test_close_with_arrays_alive_raises(store: Store) -> None:
    """An explicit close with living arrays raises BufferError and closes nothing; without them it unmaps, twice at will."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    buffer = mapped(namespace, TOKENS)
    part = buffer.stream("v", 1)[3:]
    with pytest.raises(BufferError, match="1 arrays") as caught:
        buffer.close()
    assert isinstance(caught.value, ViewsAliveError)
    assert buffer.stream("v", 1)[3:].tobytes() == part.tobytes()
    del part
    buffer.close()
    buffer.close()
    assert not store.stats().readers_pinning
    uses: list[Any] = [
        lambda: buffer.array,
        lambda: buffer.block(0),
        lambda: buffer.stream("k", 0),
        lambda: buffer.stream_pages("k"),
        lambda: buffer.detached,
        buffer.detach,
        buffer.__enter__,
    ]
    for use in uses:
        with pytest.raises(LeaseClosedError, match="closed"):
            use()
    with namespace.lease(TOKENS) as lease:
        pass
    with pytest.raises(LeaseClosedError):
        lease.map()


def test_what_is_not_there_is_named(store: Store) -> None:
    """A stream or a block that is not there is refused by name; blocks count from the end as well."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    with mapped(namespace, TOKENS) as buffer:
        with pytest.raises(ArrayError, match="nope"):
            buffer.stream("nope", 0)
        with pytest.raises(ArrayError, match="nope"):
            buffer.stream_pages("nope")
        for index in (7, -8):
            with pytest.raises(IndexError, match="7 blocks"):
                buffer.block(index)
        assert buffer.stream("v", -1).tobytes() == buffer.stream("v", 6).tobytes()


def test_nothing_to_map(store: Store) -> None:
    """A miss is an empty buffer, and so is one of a layout that has states only."""
    namespace = store.namespace(plain_layout())
    with mapped(namespace, TOKENS) as buffer:
        assert (buffer.length, buffer.blocks, buffer.array.size) == (0, 0, 0)
        assert buffer.stream_pages("k").shape == (0, 3, 16, 8)
        buffer.detach()
        assert buffer.detached
    stateful = store.namespace(Layout((), (State("r", "u8", (5,)),), block_tokens=16))
    save(stateful, TOKENS)
    with mapped(stateful, TOKENS) as buffer:
        assert (buffer.length, buffer.blocks, buffer.stride, buffer.array.size, buffer.block(2).size) == (100, 7, 0, 0, 0)
        buffer.detach()


def test_a_damaged_last_block_is_refused(store: Store) -> None:
    """The part of a last block is checked as it is copied: damage there is named and refused, and nothing stays pinned."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    with namespace.lease(TOKENS) as lease:
        offset = lease.blocks[6].file_offset
    flip(data_file(store.path), offset)
    lease = namespace.lease(TOKENS)
    with pytest.raises(BlockDamaged) as caught:
        lease.map()
    assert (caught.value.position, caught.value.offset) == (96, offset)
    lease.close()
    assert mapped(namespace, TOKENS).length == 96
    save(namespace, TOKENS)
    assert mapped(namespace, TOKENS).length == 100


def test_larger_system_pages_are_refused(store: Store) -> None:
    """Where the system's pages are of 64 KiB, payloads don't begin at one: mapping is refused by name and nothing is pinned."""
    namespace = store.namespace(plain_layout())
    save(namespace, TOKENS)
    lease = namespace.lease(TOKENS)
    pin = lease._pin
    assert pin is not None
    with pytest.raises(MappingError, match="65536 bytes") as caught:
        map_blocks(namespace.scope, pin, lease._located, lease._filler, page_bytes=65536)
    assert isinstance(caught.value, OSError)
    lease.close()


SETUP = """
store = Store.open(path)
namespace = store.namespace(wide_layout())
tokens = list(range(250))
lease = namespace.lease(tokens)
expected = session_rows(wide_layout(), tokens)["kv"]
lease.map().detach()  # so that all that is started once has started
def maps():
    return sum(1 for _ in open("/proc/self/maps"))
def size():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
"""


def in_child(code: str, path: Path) -> str:
    """Save a session, and run code in a child that has a lease on it."""
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(wide_layout()), list(range(250)))
    return run_child(SETUP + code, path)


@pytest.mark.parametrize("cut", ["whole", "a byte"])
def test_a_detach_that_cannot_read(path: Path, cut: str) -> None:
    """A detach of a buffer whose file was truncated names the block instead of dying; nothing changes, the pin stays."""
    code = f"""
buffer = lease.map()
array = buffer.array
offsets = [block.file_offset for block in lease.blocks]
last = max(offsets[:3])
os.truncate(path + "/data.mdb", 0 if {cut == "whole"} else last)
before = size()
for _ in range(3):
    try:
        buffer.detach()
        print("detached")
    except BlockDamaged as error:
        assert "can't be read" in str(error)
        assert error.offset == (offsets[0] if {cut == "whole"} else last), error
assert size() < before + array.nbytes, (size(), before)
assert not buffer.detached
if {cut != "whole"}:
    cut = offsets.index(last)
    others = [i for i in range(4) if i != cut]
    assert all(buffer.stream("kv", i).tobytes() == expected[i * 64 : (i + 1) * 64].tobytes() for i in others)
print("alive", flush=True)
os._exit(0)
"""
    assert in_child(code, path) == "alive"


def test_no_address_space(path: Path) -> None:
    """At a limit of address space mapping and detaching are refused by name, nothing is left mapped, and without it both work."""
    code = """
import resource
from kvstore.errors import MappingError
def limited(spare, what):
    resource.setrlimit(resource.RLIMIT_AS, (size() + spare, resource.RLIM_INFINITY))
    try:
        what()
        print("not refused")
    except MappingError as error:
        assert isinstance(error, OSError)
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
before = maps()
for _ in range(5):
    assert "address space" in limited(600_000, lease.map)
assert maps() == before, (maps(), before)
buffer = lease.map()
array = buffer.array
before = maps()
for _ in range(5):
    assert "as it was" in limited(600_000, buffer.detach)
assert maps() == before, (maps(), before)
assert not buffer.detached
buffer.detach()
assert array.reshape(-1, 4096)[:250].tobytes() == expected.tobytes()
print("ok")
"""
    assert in_child(code, path) == "ok"


def test_a_forked_child_takes_nothing_away(path: Path) -> None:
    """A forked child reads the right bytes, writes and detaches for itself, and ends without ending the parent's pin."""
    code = """
from kvstore.errors import ForkedStoreError, SpacePinned
buffer = lease.map()
own = lease.map()
array = buffer.array
array[5] ^= 0xFF
pid = os.fork()
if not pid:
    status = 1
    try:
        got = array.reshape(-1, 4096)[:250].copy()
        got[0, 5] ^= 0xFF
        assert got.tobytes() == expected.tobytes()
        array[:] = 1
        try:
            lease.map()
        except ForkedStoreError:
            buffer.detach()
            assert buffer.detached and (array == 1).all()
            own.close()
            del array, buffer, own
            sys.exit(0)  # with all that an interpreter does at its end
    finally:
        sys.stdout.flush()
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert store.stats().readers_pinning
del lease
namespace.evict()
try:
    for n in range(200):
        save(namespace, [5000 + n, *range(255)])
    print("not pinned")
except SpacePinned:
    pass
array[5] ^= 0xFF
assert array.reshape(-1, 4096)[:250].tobytes() == expected.tobytes()
assert own.array.tobytes() == array.tobytes()
print("ok")
"""
    assert in_child(code, path) == "ok"


def test_it_pins_the_open_file(path: Path) -> None:
    """A store is not resized under a buffer, and is under one that was detached."""
    from kvstore.errors import StoreBusyError
    from kvstore.store.resize import resize

    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(plain_layout()), TOKENS)
        buffer = mapped(store.namespace(plain_layout()), TOKENS)
    with pytest.raises(StoreBusyError):
        resize(path, 2 * CAP)
    buffer.detach()
    resize(path, 2 * CAP)
    assert buffer.array.tobytes() == expected(plain_layout(), TOKENS).tobytes()
