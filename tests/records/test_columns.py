"""Many records decoded at once, against each decoded by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.errors import IndexDamaged
from kvstore.kernel import crc32c
from kvstore.records.block import BlockHeader, Ref
from kvstore.records.columns import RefColumns, header_heads
from kvstore.records.frame import frame
from tests.support import examples

U8, U32, U64 = st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
ID = st.binary(min_size=32, max_size=32)
REFS = st.builds(Ref, U32, U8, U32, U64, U64, U32)
CHANGES = ("none", "missing", "byte", "byte, summed again", "cut", "longer", "another's", "another type", "zeros", "empty")


def mutated(block_id: bytes, ref: Ref, change: str, place: int, mask: int) -> bytes | None:
    """Give the record of a block after a change."""
    raw = ref.encode(block_id)
    at = place % len(raw)
    other = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
    changes: dict[str, bytes | None] = {
        "none": raw,
        "missing": None,
        "byte": other,
        "byte, summed again": crc32c(other[4:]).to_bytes(4, "little") + other[4:],
        "cut": raw[:at],
        "longer": raw + bytes(place % 50 + 1),
        "another's": ref.encode(bytes([block_id[0] ^ mask]) + block_id[1:]),
        "another type": frame(5, block_id, raw[40:]),
        "zeros": bytes(len(raw)),
        "empty": b"",
    }
    return changes[change]


def alone(block_id: bytes, raw: bytes | None) -> Ref | None:
    """Decode one record by itself; None where it is missing or refused."""
    try:
        return None if raw is None else Ref.decode(block_id, raw)
    except IndexDamaged:
        return None


@given(st.lists(st.tuples(ID, REFS, st.sampled_from(CHANGES), st.integers(0, 300), st.integers(1, 255)), max_size=12))
@settings(max_examples=examples(400))
def test_reference_records(drawn: list[tuple[bytes, Ref, str, int, int]]) -> None:
    """Whatever was done to records, decoding them all at once takes exactly those that decode by themselves, with their values."""
    raws = [mutated(*one) for one in drawn]
    ids = [one[0] for one in drawn]
    columns = RefColumns.decode(ids, raws)
    expected = [alone(block_id, raw) for block_id, raw in zip(ids, raws, strict=True)]
    assert columns.whole.tolist() == [ref is not None for ref in expected]
    for index, ref in enumerate(expected):
        if ref is not None:
            assert (columns.kind[index], columns.tokens[index]) == (ref.kind, ref.tokens)
            for got, right in ((columns.offset[index], ref.offset), (columns.payload_bytes[index], ref.payload_bytes)):
                assert int(got) == right if right < 1 << 63 else got < 0


@pytest.mark.parametrize("place", range(76))
def test_every_byte_of_a_reference_record(place: int) -> None:
    """One changed byte in one of many records takes that one out and no other; summed again, only what `Ref.decode` refuses."""
    ids = [bytes([i]) * 32 for i in range(20)]
    refs = [Ref(1 + i, 1, 9, 4096 * (i + 1), 1000 + i, i) for i in range(20)]
    for change in ("byte", "byte, summed again"):
        raws = [ref.encode(block_id) for block_id, ref in zip(ids, refs, strict=True)]
        changed = mutated(ids[11], refs[11], change, place, 0x20)
        assert changed is not None
        whole = RefColumns.decode(ids, [*raws[:11], changed, *raws[12:]]).whole
        right = [True] * 20
        right[11] = alone(ids[11], changed) is not None
        assert whole.tolist() == right
        assert right[11] == (change != "byte" and place not in range(4, 40))  # type, version and key are compared as well


@given(ID, ID, st.integers(1, 3), U32, st.integers(0, (1 << 63) - 1), st.lists(U32, max_size=9))
@example(bytes(32), b"\0" * 31 + b"n", 1, 0, 0, [])
@settings(max_examples=examples(100))
def test_header_heads(block_id: bytes, namespace: bytes, kind: int, tokens: int, payload_bytes: int, sums: list[int]) -> None:
    """What a header is expected to begin with is what encoding it begins with, up to its sums."""
    header = BlockHeader(kind, block_id, namespace, tokens, payload_bytes, np.array(sums, np.uint32))
    raw = Ref(1, kind, 1, 4096, payload_bytes, tokens).encode(block_id)
    heads: Any = header_heads([block_id] * 3, RefColumns.decode([block_id] * 3, [raw] * 3), len(sums), namespace)
    encoded = header.encode()
    assert heads.tobytes() == encoded[: -4 - 4 * len(sums)] * 3
    assert heads.itemsize == len(encoded) - 4 - 4 * len(sums)
