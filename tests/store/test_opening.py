"""Opening a lease looks at all of its blocks at once: one bad one among many is refused as it would be by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore import Namespace, State, Store
from kvstore.blocks import find, missing, read_header
from kvstore.errors import BlockDamaged, IndexDamaged
from kvstore.ids import as_tokens, token_bytes
from kvstore.kernel import crc32c
from kvstore.leases import find_prefix
from kvstore.leases.located import locate_rows
from kvstore.leases.pin import Pin
from kvstore.records.block import BlockHeader, Ref, header_bytes
from kvstore.records.frame import frame
from tests.support import CAP, assert_restores, assert_sound, data_file, flip, hybrid_layout, plain_layout, run_child, save

COUNT = 60
TOKENS = list(range(16 * COUNT + 7))  # and a tail
VICTIM = 37
LAYOUT = plain_layout()
SUMS = len(LAYOUT.streams)
HEADER = BlockHeader.encoded_bytes(SUMS)

Refusal = tuple[str, bytes, int | None, int | None]


@pytest.fixture
def namespace(path: Path) -> Iterator[Namespace]:
    """Save a session of many blocks in a store that the test may leave damaged."""
    with Store.open(path, max_bytes=CAP) as store:
        opened = store.namespace(LAYOUT)
        save(opened, TOKENS)
        yield opened


def refusal(error: BlockDamaged) -> Refusal:
    """Give all that an error tells the caller."""
    return str(error), error.block_id, error.position, error.offset


def at_once(namespace: Namespace) -> Refusal | None:
    """Look all blocks up as a lease does; give what is refused, if anything."""
    scope = namespace.scope
    pin = Pin(scope.store)
    try:
        found = find_prefix(scope, pin.reader, token_bytes(as_tokens(TOKENS)), len(TOKENS))
        assert found.length == len(TOKENS)
        locate_rows(scope, pin, found)
    except BlockDamaged as error:
        return refusal(error)
    finally:
        pin.drop()
    return None


def one_by_one(namespace: Namespace) -> Refusal | None:
    """Look the blocks up one after another, with the functions for one; give what is refused first."""
    scope = namespace.scope
    with scope.store.environment.reading() as txn:
        prefix = find_prefix(scope, txn, token_bytes(as_tokens(TOKENS)), len(TOKENS))
        for index, block_id in enumerate(prefix.blocks(LAYOUT.block_tokens)):
            try:
                ref = find(txn, block_id)
                if ref is None:
                    raise missing(block_id)
                read_header(scope.store.environment, block_id, ref, SUMS, scope.namespace)
            except IndexDamaged as error:
                return str(error), block_id, 16 * index, None
            except BlockDamaged as error:
                return str(error), block_id, 16 * index, error.offset
    return None


def assert_refused_at(namespace: Namespace, block: int, message: str) -> None:
    """Require that this block is the one that is refused, as by itself, and that a lease ends before it."""
    refused = at_once(namespace)
    assert refused is not None
    assert refused == one_by_one(namespace)
    assert refused[2] == 16 * block
    assert message in refused[0]
    assert_restores(namespace, TOKENS, 16 * block)
    assert namespace.scope.store.counters.damaged_blocks == 1


def places(namespace: Namespace) -> list[tuple[bytes, int]]:
    """Give the ids of the blocks and where their headers lie."""
    with namespace.lease(TOKENS) as lease:
        return [(block.block_id, block.file_offset - header_bytes(SUMS)) for block in lease.blocks]


def ref_of(namespace: Namespace, block: int) -> tuple[bytes, Ref]:
    """Give a block's id and its reference record."""
    block_id = places(namespace)[block][0]
    with namespace.scope.store.environment.reading() as txn:
        ref = find(txn, block_id)
    assert ref is not None
    return block_id, ref


def rewrite(namespace: Namespace, old: bytes, new: bytes) -> None:
    """Put other bytes in the place of a record, wherever the file has it."""
    file = data_file(namespace.scope.store.environment.path)
    data = file.read_bytes()
    at = data.find(old)
    assert at >= 0
    assert len(old) == len(new)
    with file.open("r+b") as opened:
        while at >= 0:
            opened.seek(at)
            opened.write(new)
            at = data.find(old, at + 1)


def read_at(namespace: Namespace, offset: int, length: int) -> bytes:
    """Read from the store's file."""
    return namespace.scope.store.environment.pread(length, offset)


def write_at(namespace: Namespace, offset: int, data: bytes) -> None:
    """Write into the store's file."""
    with data_file(namespace.scope.store.environment.path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def summed(head: bytes) -> bytes:
    """Give a header with the checksum that its bytes have."""
    return head[:-4] + crc32c(head[:-4]).to_bytes(4, "little")


def test_a_whole_session(namespace: Namespace) -> None:
    """All blocks of a session without damage are found, with the values that looking each up by itself gives."""
    assert at_once(namespace) is one_by_one(namespace) is None
    scope = namespace.scope
    with namespace.lease(TOKENS) as lease, scope.store.environment.reading() as txn:
        assert len(lease.blocks) == COUNT + 1
        for index, block in enumerate(lease.blocks):
            ref = find(txn, block.block_id)
            assert ref is not None
            header = read_header(scope.store.environment, block.block_id, ref, SUMS, scope.namespace)
            assert (block.start, block.tokens) == (16 * index, 16 if index < COUNT else 7)
            assert (block.held_tokens, block.file_offset, block.payload_bytes) == (ref.tokens, ref.offset, ref.payload_bytes)
            assert block.sums.tolist() == header.sums.tolist()
    assert_restores(namespace, TOKENS, len(TOKENS))


@pytest.mark.parametrize("block", [0, VICTIM, COUNT])
@pytest.mark.parametrize("place", [0, 4, 5, 6, 8, 39, 40, 44, 48, 52, 60, 68, 75])
def test_a_damaged_reference_record(namespace: Namespace, block: int, place: int) -> None:
    """A byte flipped in any field of one reference record refuses that block; a match ends before it."""
    block_id, ref = ref_of(namespace, block)
    raw = ref.encode(block_id)
    rewrite(namespace, raw, raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
    assert_refused_at(namespace, block, "fails its checksum")


def test_reference_records_that_are_whole_and_wrong(namespace: Namespace) -> None:
    """A reference record with a right checksum is still refused: another block's, of another type, of other values."""
    block_id, ref = ref_of(namespace, VICTIM)
    _, other = ref_of(namespace, 3)
    raw = ref.encode(block_id)
    wrong = {
        "asked for the record": [other.encode(block_id[::-1]), frame(5, block_id, raw[40:])],
        "header is that of another": [
            replace(ref, tokens=8).encode(block_id),
            replace(ref, kind=2).encode(block_id),
            replace(ref, payload_bytes=ref.payload_bytes + 1).encode(block_id),
            replace(ref, offset=other.offset).encode(block_id),
        ],
        "no block header": [replace(ref, offset=ref.offset + 4096).encode(block_id)],
        "do not lie in the file": [
            replace(ref, offset=offset, payload_bytes=length).encode(block_id)
            for offset, length in [(0, 9), (1 << 40, 9), ((1 << 64) - 1, 9), (1 << 63, 9), (4096, 1 << 40), (4096, (1 << 64) - 1)]
        ],
    }
    for message, records in wrong.items():
        for record in records:
            rewrite(namespace, raw, record)
            refused = at_once(namespace)
            assert refused is not None
            assert refused == one_by_one(namespace)
            assert refused[2] == 16 * VICTIM
            assert message in refused[0]
            raw = record
    assert_restores(namespace, TOKENS, 16 * VICTIM)


@pytest.mark.parametrize("block", [0, VICTIM, COUNT])
@pytest.mark.parametrize("place", [0, 8, 10, 11, 12, 16, 47, 48, 79, 80, 84, 88, 96, HEADER - 5, HEADER - 4, HEADER - 1])
def test_a_damaged_header(namespace: Namespace, block: int, place: int) -> None:
    """A byte flipped in any field of one header refuses that block; a match ends before it."""
    flip(data_file(namespace.scope.store.environment.path), places(namespace)[block][1] + place)
    assert_refused_at(namespace, block, "block")


@pytest.mark.parametrize("place", [0, 8, 10, 12, 16, 47, 48, 79, 80, 84, 88])
def test_a_header_of_other_values(namespace: Namespace, place: int) -> None:
    """A header that says something else is refused although its checksum is right, whichever field it is."""
    offset = places(namespace)[VICTIM][1]
    head = read_at(namespace, offset, HEADER)
    write_at(namespace, offset, summed(head[:place] + bytes([head[place] ^ 1]) + head[place + 1 :]))
    assert_refused_at(namespace, VICTIM, "block")


def test_what_a_header_does_not_use(namespace: Namespace) -> None:
    """The byte of a header that means nothing may be anything, as long as its checksum is right."""
    offset = places(namespace)[VICTIM][1]
    head = read_at(namespace, offset, HEADER)
    write_at(namespace, offset, summed(head[:11] + b"\x07" + head[12:]))
    assert at_once(namespace) is one_by_one(namespace) is None
    assert_restores(namespace, TOKENS, len(TOKENS))


def test_the_header_of_another_block(namespace: Namespace) -> None:
    """A whole header of another block of the session in a block's place is refused."""
    there = places(namespace)
    write_at(namespace, there[VICTIM][1], read_at(namespace, there[VICTIM + 1][1], HEADER))
    assert_refused_at(namespace, VICTIM, "another block")


def test_a_block_longer_than_the_file(namespace: Namespace) -> None:
    """Where record and header agree on a length that the file can't have, the block is refused before anything looks there."""
    offset = places(namespace)[VICTIM][1]
    block_id, ref = ref_of(namespace, VICTIM)
    head = read_at(namespace, offset, HEADER)
    write_at(namespace, offset, summed(head[:88] + (1 << 40).to_bytes(8, "little") + head[96:]))
    rewrite(namespace, ref.encode(block_id), replace(ref, payload_bytes=1 << 40).encode(block_id))
    assert_refused_at(namespace, VICTIM, "do not lie in the file")


@pytest.mark.parametrize("header_first", [True, False])
def test_the_first_of_several(namespace: Namespace, header_first: bool) -> None:
    """Of a bad reference record and a bad header, the one that comes first in the prompt is refused first."""
    header, record = (5, 20) if header_first else (20, 5)
    flip(data_file(namespace.scope.store.environment.path), places(namespace)[header][1] + 20)
    with namespace.scope.store.environment.reading() as txn:
        ids = find_prefix(namespace.scope, txn, token_bytes(as_tokens(TOKENS)), len(TOKENS)).blocks(16)
        ref = find(txn, ids[record])
    assert ref is not None
    raw = ref.encode(ids[record])
    rewrite(namespace, raw, raw[:-1] + b"\x01")
    refused = at_once(namespace)
    assert refused is not None
    assert refused == one_by_one(namespace)
    assert refused[2] == 16 * 5
    assert_restores(namespace, TOKENS, 16 * 5)


def test_blocks_that_a_session_holds_twice(store: Store) -> None:
    """Equal blocks at several positions of a session are one block, found at each of them."""
    namespace = store.namespace(LAYOUT)
    tokens = [9] * 160
    rows = {s.name: np.full(s.array_shape(160), 3, s.view_dtype) for s in LAYOUT.streams}
    namespace.save(tokens, rows)
    with namespace.lease(tokens) as lease:
        assert len({block.block_id for block in lease.blocks}) == 1
        assert [block.start for block in lease.blocks] == list(range(0, 160, 16))
        into = {name: np.zeros_like(array) for name, array in rows.items()}
        lease.copy_into(into)
        assert all(np.array_equal(into[name], array) for name, array in rows.items())


def test_states_are_looked_up_likewise(path: Path) -> None:
    """A damaged block of a checkpoint of several blocks ends a match at the checkpoint before."""
    layout = hybrid_layout(states=[*hybrid_layout().states, State("large", "u8", (2_500_000,))])
    with Store.open(path, max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS[:50])
        save(namespace, TOKENS[:90])
        assert_restores(namespace, TOKENS[:90], 90)
        with namespace.lease(TOKENS[:90]) as lease:
            states = lease._states
            assert len(states) > 2
            flip(data_file(path), int(states.offset[1]) - header_bytes(1) + 97)
        assert_restores(namespace, TOKENS[:90], 50)
        save(namespace, TOKENS[:90])
        assert_restores(namespace, TOKENS[:90], 90)
        assert_sound(store)


TRUNCATED = """
with Store.open(path, max_bytes=CAP) as store:
    namespace = store.namespace(plain_layout())
    save(namespace, list(range(967)))
    with namespace.lease(list(range(967))) as lease:
        offsets = [block.file_offset for block in lease.blocks]
    os.truncate(data_file(path), max(offsets) - 4080 + int(sys.argv[2]))
    try:
        namespace.lease(list(range(967)))
    except StoreDamagedError as error:
        print("was cut off" in str(error), store._scope.counters.damaged_blocks)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize("left", [0, 1, 95, 96, HEADER - 1])
def test_a_file_that_ends_inside_a_header(path: Path, left: int) -> None:
    """Where the file was cut inside or before a header, a lease is refused for that, and no block for its bytes; nobody dies."""
    assert run_child("from kvstore.errors import StoreDamagedError" + TRUNCATED, path, str(left)) == "True 0"


FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/uio.h>

/* EIO for reads at [FAIL_FROM, FAIL_TO) of any file, the first FAIL_TIMES times. */
static int times;
static int fails(off_t offset) {
    const char *from = getenv("FAIL_FROM");
    if (!from || offset < atoll(from) || offset >= atoll(getenv("FAIL_TO")) || times >= atoi(getenv("FAIL_TIMES"))) return 0;
    times++;
    errno = EIO;
    return 1;
}
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
ssize_t pread(int fd, void *to, size_t n, off_t at) { return fails(at) ? -1 : NEXT(pread)(fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return fails(at) ? -1 : NEXT(pread64)(fd, to, n, at); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return fails(at) ? -1 : NEXT(preadv)(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t at) { return fails(at) ? -1 : NEXT(preadv64)(fd, v, n, at); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int f) { return fails(at) ? -1 : NEXT(preadv2)(fd, v, n, at, f); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off_t at, int f) {
    return fails(at) ? -1 : NEXT(preadv64v2)(fd, v, n, at, f);
}
"""

UNREADABLE = """
from tests.store.test_opening import *
tokens = list(range(967))
with Store.open(path, max_bytes=CAP) as store:
    namespace = store.namespace(plain_layout())
    save(namespace, tokens)
    there = places(namespace)[37][1]
    os.environ.update(FAIL_FROM=str(there), FAIL_TO=str(there + 4096), FAIL_TIMES=sys.argv[2])
    if sys.argv[3] == "error":
        print(repr(at_once(namespace)) == repr(one_by_one(namespace)), at_once(namespace)[0].split(":", 1)[1])
    else:
        print(restored(namespace, tokens), store.stats().counters.damaged_blocks)
"""


@pytest.fixture(scope="session")
def failing_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a library that fails chosen reads of the process that it is loaded into."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path_factory.mktemp("failing") / "failing.c"
    source.write_text(FAILING)
    library = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("times", "what", "expected"),
    [
        (10**9, "error", "True  [Errno 5] Input/output error"),
        (10**9, "restored", "592 1"),
        (1, "restored", "967 0"),
        (2, "restored", "967 0"),
    ],
)
def test_a_header_that_the_disk_cannot_read(
    path: Path, failing_reads: Path, monkeypatch: pytest.MonkeyPatch, times: int, what: str, expected: str
) -> None:
    """An I/O error at one header refuses that block by name; one that passes when it is read again refuses nothing."""
    monkeypatch.setenv("LD_PRELOAD", os.fspath(failing_reads))
    assert run_child(UNREADABLE, path, str(times), what) == expected
