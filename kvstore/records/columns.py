"""Reference records and headers of many blocks at once, as columns: what is checked one by one is checked here for all.

A lease on a long prompt looks at hundreds of blocks; an object and a dozen calls for each would cost more than reading them.
Nothing here says what is wrong with a record: whoever wants to know decodes that one by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.ids import ID_BYTES
from kvstore.kernel import crc32c_each
from kvstore.records.block import REF_TYPE, header_bytes
from kvstore.records.constants import BLOCK_MAGIC, FORMAT_VERSION
from kvstore.records.frame import RECORD_VERSION

__all__ = ["RefColumns", "header_heads"]

_CRC_BYTES = 4
_WORDS = ID_BYTES // 8  # an id as integers, which compare faster than bytes

# on disk: `frame._HEAD`, the key, `block._REF_BODY`
_REF = np.dtype(
    [
        ("crc", "<u4"),
        ("type", "u1"),
        ("version", "u1"),
        ("key_bytes", "<u2"),
        ("key", "<u8", (_WORDS,)),
        ("count", "<u4"),
        ("kind", "u1"),
        ("unused_1", "u1", (3,)),
        ("pages", "<u4"),
        ("offset", "<u8"),
        ("payload_bytes", "<u8"),
        ("tokens", "<u4"),
        ("unused_2", "u1", (4,)),
    ]
)
# on disk: `block._HEADER`
_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("kind", "u1"),
        ("unused", "u1"),
        ("header_bytes", "<u4"),
        ("block_id", "<u8", (_WORDS,)),
        ("namespace", "<u8", (_WORDS,)),
        ("tokens", "<u4"),
        ("sums", "<u4"),
        ("payload_bytes", "<u8"),
    ]
)


def _words(joined: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(joined, "<u8").reshape(-1, _WORDS)


@dataclass(frozen=True, slots=True, eq=False)
class RefColumns:
    """Reference records of some blocks, in the order that they were asked for.

    Attributes
    ----------
    whole : bool array
        Whether there is a record and it passed every check that `Ref.decode` makes. Where it is false, the other columns mean
        nothing.
    kind : uint8 array
        As in `Ref`; so are the others.
    offset, payload_bytes, tokens : int64 array
        What does not fit is negative.
    """

    whole: npt.NDArray[np.bool_]
    kind: npt.NDArray[np.uint8]
    offset: npt.NDArray[np.int64]
    payload_bytes: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, block_ids: Sequence[bytes], raws: Sequence[bytes | None]) -> RefColumns:
        """Decode the records found under these ids (32 bytes each); None stands for one that isn't there. Raises nothing."""
        size = _REF.itemsize
        if None in raws or set(map(len, raws)) != {size}:  # type: ignore[arg-type]  # none of them is None here
            missing = bytes(size)  # no record of zeros is whole
            raws = [raw if raw is not None and len(raw) == size else missing for raw in raws]
        joined = b"".join(raws)  # type: ignore[arg-type]
        records = np.frombuffer(joined, _REF)
        whole = records["crc"] == crc32c_each(joined, size, skip=_CRC_BYTES)
        whole &= (records["type"] == REF_TYPE) & (records["version"] == RECORD_VERSION) & (records["key_bytes"] == ID_BYTES)
        whole &= (records["key"] == _words(b"".join(block_ids))).all(axis=1)
        offset, payload_bytes, tokens = (records[name].astype(np.int64) for name in ("offset", "payload_bytes", "tokens"))
        return cls(whole, records["kind"], offset, payload_bytes, tokens)


def header_heads(block_ids: Sequence[bytes], refs: RefColumns, sums: int, namespace: bytes) -> npt.NDArray[Any]:
    """What the headers of some blocks have to begin with, checksums excluded: a packed array, one element for each.

    Parameters
    ----------
    block_ids : sequence of bytes
        32 bytes each.
    refs : RefColumns
        Their reference records.
    sums : int
        Checksums in each header.
    namespace : bytes
        Id of the namespace that they belong to.
    """
    heads = np.zeros(len(block_ids), _HEAD)
    heads["magic"] = BLOCK_MAGIC
    heads["version"] = FORMAT_VERSION
    heads["kind"] = refs.kind
    heads["header_bytes"] = header_bytes(sums)
    heads["block_id"] = _words(b"".join(block_ids))
    heads["namespace"] = _words(namespace)
    heads["tokens"] = refs.tokens
    heads["sums"] = sums
    heads["payload_bytes"] = refs.payload_bytes
    return heads
