"""One fixed value of every record: what the golden file pins, and where mutations start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore import Layout, State, Stream
from kvstore.kernel import crc32c
from kvstore.records.block import BadRecord, BlockHeader, Ref
from kvstore.records.meta import Counters, NamespaceRecord, RootRecord, SaveRecord, StoreRecord, decode_format, encode_format
from kvstore.records.node import Checkpoint, Node, Usage, child_key, decode_child, encode_child, node_key
from kvstore.records.states import pack_states, unpack_states

LAYOUT = Layout(
    streams=(Stream("k", "f16", (2, 4), 1), Stream("pool", "q8_0", (32,), 0, 4)),
    states=(State("r", "f32", (3,)), State.opaque("blob", 10)),
    model="golden",
    identity={"revision": "r1", "layers": 2},
    shard=(1, 2),
    block_tokens=16,
)

NAMESPACE = bytes(range(32))
BLOCK = bytes(range(100, 132))
OTHER = bytes(range(200, 232))
TOKENS = np.arange(7, 7 + 20, dtype="<u4").tobytes()

HEADER = BlockHeader(1, BLOCK, NAMESPACE, 16, 4096, np.array([0x01020304, 0xFFFFFFFF], np.uint32))
REF = Ref(3, 1, 2, 65536, 4096, 16)
NODE = Node(
    node=9,
    parent=4,
    root=1,
    start=16,
    end=36,
    tokens=TOKENS,
    blocks=BLOCK,
    tail=OTHER,
    checkpoints=(Checkpoint(30, 5, True, 192, BLOCK), Checkpoint(36, 6, False, 192, OTHER + BLOCK)),
)
BARE_NODE = Node(10, 1, 1, 0, 20, TOKENS, BLOCK, OTHER)
STORE = StoreRecord(bytes(range(16)), 2, 1 << 30, 32768, 1_700_000_000_000_000)
NAMESPACE_RECORD = NamespaceRecord(NAMESPACE, 7, 1_700_000_000_000_001, OTHER, LAYOUT.canonical)
ROOT = RootRecord(7, NAMESPACE, 129, 33)
SAVE = SaveRecord(0x0102, 9, 36, 4321, 987_654, bytes(range(16)))
STATES: dict[str, Any] = {"r": np.array([1.5, -2.0, 0.0], np.float32), "blob": np.arange(5, dtype=np.uint8)}
PACKED = np.concatenate(list(pack_states(LAYOUT, STATES)))
CHILD_KEY = child_key(4, 0x01020304)

ENCODED: dict[str, bytes] = {
    "format": encode_format(),
    "store": STORE.encode(),
    "counters": Counters(12, 34).encode(),
    "namespace": NAMESPACE_RECORD.encode(),
    "node key": node_key(9),
    "root": ROOT.encode(),
    "save key": SaveRecord.key_of(0x0102),
    "save": SAVE.encode(),
    "child key": CHILD_KEY,
    "child": encode_child(CHILD_KEY, 9),
    "node": NODE.encode(),
    "node without checkpoints": BARE_NODE.encode(),
    "usage": Usage(1_700_000_000_000_002, 11).encode(9),
    "header": HEADER.encode(),
    "ref": REF.encode(BLOCK),
    "bad": BadRecord(1_700_000_000_000_003).encode(BLOCK),
    "states": PACKED.tobytes(),
    "layout": LAYOUT.canonical,
}


def aligned(raw: bytes) -> Any:
    """Copy bytes to an address that unpacking states asks for."""
    buffer = np.zeros(len(raw) + 64, np.uint8)
    skip = -buffer.__array_interface__["data"][0] % 64
    view = buffer[skip : skip + len(raw)]
    view[:] = np.frombuffer(raw, np.uint8)
    return view


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "format": decode_format,
    "store": StoreRecord.decode,
    "counters": Counters.decode,
    "namespace": lambda raw: NamespaceRecord.decode(NAMESPACE, raw),
    "save": lambda raw: SaveRecord.decode(SaveRecord.key_of(0x0102), raw),
    "root": lambda raw: RootRecord.decode(7, raw),
    "child": lambda raw: decode_child(CHILD_KEY, raw),
    "node": lambda raw: Node.decode(9, raw),
    "node without checkpoints": lambda raw: Node.decode(10, raw),
    "usage": lambda raw: Usage.decode(9, raw),
    "header": BlockHeader.decode,
    "ref": lambda raw: Ref.decode(BLOCK, raw),
    "states": lambda raw: unpack_states(LAYOUT, aligned(raw)),
    "layout": Layout.decode,
}


def summed_again(name: str, raw: bytes) -> bytes:
    """Give a changed record a checksum that is right again, so that what lies behind the checksum is put to the test."""
    if name in ("states", "layout"):
        return raw
    if name in ("format", "header"):
        return raw[:-4] + crc32c(raw[:-4]).to_bytes(4, "little")
    return crc32c(raw[4:]).to_bytes(4, "little") + raw[4:]
