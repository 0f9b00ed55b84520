"""The format, pinned byte for byte. A difference here means that stores in the field can't be read any more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvstore import Store, ids
from kvstore.env.pages import write_empty
from kvstore.records import constants
from kvstore.records.block import BlockHeader, Geometry, Ref, header_bytes
from kvstore.records.constants import inline_limit
from kvstore.records.node import node_record_bytes
from kvstore.testing import session_rows, session_states
from tests.support import data_file

from .examples import BLOCK, ENCODED, LAYOUT, NODE

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden.json").read_text())


def test_every_record_is_pinned() -> None:
    """The golden file has exactly the records that there are."""
    assert set(GOLDEN) == {*ENCODED, "meta page"}


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_a_record_is_what_it_was(name: str) -> None:
    """Each record, written with fixed values, gives the bytes that the golden file holds."""
    assert ENCODED[name].hex() == GOLDEN[name]


def test_constants_are_what_they_were() -> None:
    """Constants that are on disk have the values that stores in the field were written with."""
    pinned = {
        "FORMAT_VERSION": 1,
        "STORE_MAGIC": b"kvstore\0",
        "BLOCK_MAGIC": b"kvsblock",
        "KIND_ROWS": 1,
        "KIND_STATES": 2,
        "KIND_ENTRY": 3,
        "DATABASES": ("meta", "namespaces", "children", "nodes", "usage", "blocks", "refs", "bad", "roots", "spacers"),
        "DATA_FILE": "data.mdb",
        "OPEN_LOCK_FILE": "open.lock",
        "WRITE_LOCK_FILE": "write.lock",
        "PAGE_HEADER": 16,
        "PAYLOAD_ALIGN": 4096,
        "TAIL_SIZES": 16,
    }
    assert {name: getattr(constants, name) for name in pinned} == pinned


def test_identities_of_a_fixed_layout_are_pinned() -> None:
    """The fingerprint, the namespace and the block domain of a fixed layout keep their values."""
    namespace = ids.namespace_id(LAYOUT.fingerprint, ids.salt_digest(b"tenant"))
    assert LAYOUT.fingerprint.hex() == "9771ae8a03c96f9f058d6bb5292ca1ff60690bd764da323b166da8cdaeea3b3b"
    assert namespace.hex() == "699f16d1fd7f762559ce23b3d42ce2ff1c6af204348aed095320d25d0536e9fb"
    assert ids.block_domain(namespace).hex() == "0aef626cdc7659aa38140a9e92ecafb85b8eda96e4f1f43746af33fc8a840195"


def test_a_stored_block_is_pinned(tmp_path: Path) -> None:
    """A fixed session stored in a new store has the block ids, checksums and payload that it always had, read from the file."""
    tokens = list(range(20))
    with Store.open(tmp_path / "s", max_bytes=8 << 20) as store:
        namespace = store.namespace(LAYOUT, salt=b"tenant")
        namespace.save(tokens, session_rows(LAYOUT, tokens), states=session_states(LAYOUT, tokens))
        with namespace.lease(tokens) as lease:
            found = [(b.block_id.hex(), b.tokens, b.payload_bytes, b.sums.tolist()) for b in lease.blocks]
            offset, length = lease.blocks[0].file_offset, lease.blocks[0].payload_bytes
    assert found == [
        ("dfb9c78473fa28f7ee6733fe7c0ed27b7eecaf79136e200fd749b7222d4ce116", 16, 448, [1319729725, 986357724]),
        ("4a9e89d3d093bcf35f75128aec8a9af102bc5ea097426c4f72ceb451899a890f", 4, 128, [1245793714, 569826819]),
    ]
    with data_file(tmp_path / "s").open("rb") as file:
        file.seek(offset - header_bytes(2))
        header = BlockHeader.decode(file.read(BlockHeader.encoded_bytes(2)))
        file.seek(offset)
        payload = file.read(length)
    assert offset % 4096 == 0
    assert (header.block_id.hex(), header.sums.tolist()) == (found[0][0], found[0][3])
    assert blake3(payload).hexdigest() == "af9538d8edf7c4c85feffbc267cfe8cc1fa80c445953e4e9bb4d6f41727b526b"


def test_an_empty_file_is_pinned(tmp_path: Path) -> None:
    """The two meta pages with which a store begins are what they were."""
    path = tmp_path / "data.mdb"
    write_empty(str(path), page_bytes=32768, map_bytes=1 << 26)
    raw = path.read_bytes()
    assert len(raw) == 2 * 32768
    assert raw[:160].hex() == GOLDEN["meta page"]
    assert not any(raw[160:32768])
    assert raw[32768 : 32768 + 8] == (1).to_bytes(8, "little")


def test_sizes_follow_the_format() -> None:
    """Padding, inline limit and record sizes are those of docs/format.md."""
    assert inline_limit(32768, 8) == 16358
    assert inline_limit(4096, 32) == 1998
    assert [header_bytes(n) for n in (0, 1, 100, 995, 996)] == [4080, 4080, 4080, 4080, 8176]
    assert len(NODE.encode()) == node_record_bytes(20, 1, (1, 2))
    geometry = Geometry.of(32768, 1, 4 << 20)
    assert geometry.full_pages == 129
    for payload in (0, 1, 100_000, 4 << 20):
        value = geometry.value_bytes(header_bytes(1), payload)
        assert (value + 16) % 32768 == 0
        assert value >= header_bytes(1) + payload
    assert len({geometry.value_bytes(4080, n) for n in range(0, (4 << 20) + 1, 4096)}) <= constants.TAIL_SIZES


def test_a_header_is_padded_to_the_payload() -> None:
    """A payload behind a header of any number of sums starts on a 4 KiB boundary, 16 bytes behind a page's start included."""
    for sums in range(3000):
        assert (constants.PAGE_HEADER + header_bytes(sums)) % 4096 == 0
        assert header_bytes(sums) >= BlockHeader.encoded_bytes(sums)


def test_a_count_moves_by_what_it_is_told() -> None:
    """A reference record counted up and down is the same record again."""
    ref = Ref.decode(BLOCK, ENCODED["ref"])
    assert ref.counted(2).count == 5
    assert ref.counted(2).counted(-2) == ref
    assert np.array_equal(BlockHeader.decode(ENCODED["header"]).sums, [0x01020304, 0xFFFFFFFF])
