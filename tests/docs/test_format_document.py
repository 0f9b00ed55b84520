"""docs/format.md is true: every example in it is what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvstore import ids
from kvstore.env import entry
from kvstore.kernel import crc32c
from kvstore.layout import DTYPES, Layout, State, Stream
from kvstore.locks import FileLock
from kvstore.records.block import BadRecord, BlockHeader, Ref
from kvstore.records.constants import KIND_ROWS, inline_limit
from kvstore.records.meta import Counters, NamespaceRecord, RootRecord, SaveRecord, StoreRecord, decode_format, encode_format
from kvstore.records.node import Checkpoint, Node, Usage, child_key, decode_child, encode_child, node_key
from kvstore.records.states import pack_states, unpack_states

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
TIME = 1_700_000_000_000_000

LAYOUT = Layout(
    (Stream("k", "f16", (2,)), Stream("v", "u8", (3,))),
    (State("r", "f32", (2,)),),
    model="m",
    identity={"rev": 1},
    block_tokens=4,
)


def example(name: str) -> dict[str, bytes]:
    """The lines of a hex block of the document, by their names."""
    found = re.search(rf"```hex {name}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found, f"docs/format.md has no example {name!r}"
    return {line.split()[0]: bytes.fromhex(line.split()[1]) for line in found[1].splitlines()}


def namespace() -> bytes:
    """The id of the example's namespace."""
    return ids.namespace_id(LAYOUT.fingerprint, ids.salt_digest(b"tenant"))


def payload() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The payload of the example's block of four rows."""
    data = np.zeros(LAYOUT.payload_bytes(4), np.uint8)
    data[:16] = range(16)
    data[64:76] = range(100, 112)
    return data


def test_who_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of open.lock is that of the document, and is read as it was written."""
    found = re.search(r"```text holder\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found
    where = {b"boot": b"6f2c9d0e-3a51-4c0b-9a57-1f0d6f3f1f6e", b"pid-namespace": b"4026531836"}
    monkeypatch.setattr(entry, "_here", lambda: where)
    lock = FileLock(str(tmp_path / "open.lock"))
    entry.write_holder(lock)
    assert entry.holder(lock) == found[1].encode()
    assert entry._parse(entry.holder(lock)) == where
    lock.close()


def test_layout_and_identities() -> None:
    """The canonical layout and all derived identities are those of the document."""
    found = re.search(r"```text layout\n(.*?)\n```", DOCUMENT, re.DOTALL)
    assert found
    assert LAYOUT.canonical.decode() == found[1]
    assert Layout.decode(found[1].encode()) == LAYOUT
    assert example("identities") == {
        "fingerprint": LAYOUT.fingerprint,
        "salt_digest": ids.salt_digest(b"tenant"),
        "namespace_id": namespace(),
        "block_domain": ids.block_domain(namespace()),
    }


def test_meta_records() -> None:
    """The records of `meta` are written and read as documented."""
    raw = example("format")["format"]
    assert encode_format() == raw
    assert decode_format(raw) == 1
    record = StoreRecord(bytes(range(16)), 1, 1 << 30, 32768, TIME)
    assert record.encode() == example("store")["store"]
    assert StoreRecord.decode(example("store")["store"]) == record
    assert Counters(7, 3).encode() == example("counters")["counters"]
    assert Counters.decode(example("counters")["counters"]) == Counters(7, 3)
    save = SaveRecord(3, 2, 9, 4321, 987_654, bytes(range(16)))
    assert (SaveRecord.key_of(3), save.encode()) == (example("save")["key"], example("save")["value"])
    assert SaveRecord.decode(example("save")["key"], example("save")["value"]) == save
    body = save.encode()[8 + 13 :]
    assert [int.from_bytes(body[a:b], "little") for a, b in ((0, 8), (8, 12), (12, 16), (16, 24))] == [2, 9, 4321, 987_654]
    assert body[24:] == bytes(range(16))


def test_namespace_record_offsets() -> None:
    """The namespace record has the documented offsets behind its envelope of 8 + 32 bytes."""
    salt = ids.salt_digest(b"tenant")
    record = NamespaceRecord(namespace(), 9, TIME, salt, LAYOUT.canonical)
    body = record.encode()[40:]
    assert int.from_bytes(body[:8], "little") == 9
    assert int.from_bytes(body[8:16], "little") == TIME
    assert body[16:48] == salt
    assert int.from_bytes(body[48:52], "little") == len(LAYOUT.canonical)
    assert body[52:] == LAYOUT.canonical
    assert NamespaceRecord.decode(namespace(), record.encode()) == record
    root = RootRecord(1, namespace(), 2, 33)
    assert (root.key, root.encode()) == (example("root")["key"], example("root")["value"])
    assert RootRecord.decode(1, root.encode()) == root


def test_index_records() -> None:
    """Child, node and usage records are written and read as documented."""
    child = example("child")
    assert child_key(1, 5) == child["key"]
    assert encode_child(child["key"], 2) == child["value"]
    assert decode_child(child["key"], child["value"]) == 2
    tokens = np.arange(5, 10, dtype="<u4").tobytes()
    checkpoint = Checkpoint(5, 3, True, 192, b"\x33" * 32)
    node = Node(2, 1, 1, 0, 5, tokens, b"\x11" * 32, b"\x22" * 32, (checkpoint,))
    assert node_key(2) == example("node")["key"]
    assert node.encode() == example("node")["value"]
    assert Node.decode(2, example("node")["value"]) == node
    assert Usage(TIME, 2).encode(2) == example("usage")["value"]
    assert Usage.decode(2, example("usage")["value"]) == Usage(TIME, 2)


def test_block_records() -> None:
    """A block's id, header, packed states, reference and bad mark are those of the document."""
    data = payload()
    block_id = ids.block_id(ids.block_domain(namespace()), KIND_ROWS, 4, data.data)
    sums = np.array([crc32c(data[:16]), crc32c(data[64:76])], np.uint32)
    header = BlockHeader(KIND_ROWS, block_id, namespace(), 4, data.nbytes, sums)
    assert example("block") == {"block_id": block_id, "header": header.encode()}
    assert BlockHeader.decode(example("block")["header"]).block_id == block_id
    packed = example("states")["packed"]
    state = np.array([1.0, 2.0], np.float32)
    assert b"".join(run.tobytes() for run in pack_states(LAYOUT, {"r": state})) == packed
    aligned = np.frombuffer(packed, np.uint8)
    assert np.array_equal(unpack_states(LAYOUT, aligned)["r"], state)
    ref = Ref(1, KIND_ROWS, 2, 69632, 128, 4)
    assert ref.encode(block_id) == example("ref")["value"]
    assert Ref.decode(block_id, example("ref")["value"]) == ref
    assert BadRecord(TIME).encode(block_id) == example("bad")["value"]


def test_numbers_in_the_text() -> None:
    """The inline limit, the header's capacity and the sizes of all dtypes in the text are the code's."""
    assert f"{inline_limit(32768, 8):,} bytes" in DOCUMENT
    assert BlockHeader(1, bytes(32), bytes(32), 1, 1, np.zeros(995, np.uint32)).padded_bytes == 4080
    assert BlockHeader(1, bytes(32), bytes(32), 1, 1, np.zeros(996, np.uint32)).padded_bytes == 8176
    for label in DTYPES:
        assert f"`{label}`" in DOCUMENT, f"docs/format.md does not name dtype {label}"


@pytest.mark.parametrize("label", [d.label for d in DTYPES.values() if d.group == 32])
def test_quantised_sizes_in_the_text(label: str) -> None:
    """The group size of each quantised dtype stands in the text."""
    assert f"`{label}` {DTYPES[label].group_bytes}" in DOCUMENT
