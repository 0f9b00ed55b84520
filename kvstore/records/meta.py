"""Records of the store as a whole: its identity, its counters, its namespaces."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvstore.errors import FormatVersionError, IndexDamaged
from kvstore.kernel import crc32c
from kvstore.records.constants import FORMAT_VERSION, STORE_MAGIC
from kvstore.records.frame import frame, unframe

__all__ = [
    "COUNTERS_KEY",
    "FORMAT_KEY",
    "SAVE_PREFIX",
    "STORE_KEY",
    "SWEEP_KEY",
    "Counters",
    "NamespaceRecord",
    "RootRecord",
    "SaveRecord",
    "StoreRecord",
    "decode_format",
    "encode_format",
    "encode_sweep",
]

# keys of `meta`; on disk
FORMAT_KEY: Final = b"format"
STORE_KEY: Final = b"store"
COUNTERS_KEY: Final = b"counters"
SWEEP_KEY: Final = b"sweep"
SAVE_PREFIX: Final = b"save:"  # followed by the save id, big-endian

# record types; on disk
_STORE, _COUNTERS, _NAMESPACE, _ROOT, _SWEEP, _SAVE = 1, 2, 3, 9, 10, 11

# on disk; the layout of this one record never changes, whatever the version, so that every version can name every other
_FORMAT_BODY = struct.Struct("<8sI")
_STORE_BODY = struct.Struct("<16sQQIIQ")
_COUNTERS_BODY = struct.Struct("<QQ")
_ROOT_BODY = struct.Struct("<32sII")
_SAVE_BODY = struct.Struct("<QIIQ16s")
_SAVE_ID = struct.Struct(">Q")
_NAMESPACE_BODY = struct.Struct("<QQ32sI")


def encode_format() -> bytes:
    """Encode the record that says which format this store is of: magic, version, CRC32C of both."""
    body = _FORMAT_BODY.pack(STORE_MAGIC, FORMAT_VERSION)
    return body + crc32c(body).to_bytes(4, "little")


def decode_format(raw: bytes) -> int:
    """Read the format's version.

    Raises
    ------
    IndexDamaged
        When the record is not one of a kvstore at all.
    FormatVersionError
        When the version is not the one that this code reads.
    """
    if len(raw) != _FORMAT_BODY.size + 4 or not raw.startswith(STORE_MAGIC):
        raise IndexDamaged("the format record is not one of a kvstore")
    if crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise IndexDamaged("the format record fails its checksum")
    version = int(_FORMAT_BODY.unpack_from(raw)[1])
    if version != FORMAT_VERSION:
        what = "upgrade kvstore to read it" if version > FORMAT_VERSION else "make a new store; its sessions are computed again"
        raise FormatVersionError(f"the store is of format {version}, this code reads format {FORMAT_VERSION}: {what}")
    return version


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """Identity of a store. Written when it is created, and by a resize.

    Attributes
    ----------
    store_id : bytes
        16 random bytes.
    generation : int
        Counts rewrites of the file (compactions): recorded file offsets hold within one generation.
    cap : int
        The most bytes that the store's directory takes on disk.
    page_bytes : int
        LMDB's page size in this file.
    created : int
        Microseconds since the epoch.
    """

    store_id: bytes
    generation: int
    cap: int
    page_bytes: int
    created: int

    def encode(self) -> bytes:
        """Encode as the value of `meta`'s key `store`."""
        body = _STORE_BODY.pack(self.store_id, self.generation, self.cap, self.page_bytes, 0, self.created)
        return frame(_STORE, STORE_KEY, body)

    @classmethod
    def decode(cls, raw: bytes) -> StoreRecord:
        """Decode; raises IndexDamaged."""
        start = unframe(_STORE, STORE_KEY, raw)
        if len(raw) != start + _STORE_BODY.size:
            raise IndexDamaged(f"the store record has {len(raw)} bytes, expected {start + _STORE_BODY.size}")
        store_id, generation, cap, page_bytes, _, created = _STORE_BODY.unpack_from(raw, start)
        return cls(store_id, generation, cap, page_bytes, created)


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers that are handed out once and never again."""

    next_node: int = 1
    next_save: int = 1

    def encode(self) -> bytes:
        """Encode as the value of `meta`'s key `counters`."""
        return frame(_COUNTERS, COUNTERS_KEY, _COUNTERS_BODY.pack(self.next_node, self.next_save))

    @classmethod
    def decode(cls, raw: bytes) -> Counters:
        """Decode; raises IndexDamaged."""
        start = unframe(_COUNTERS, COUNTERS_KEY, raw)
        if len(raw) != start + _COUNTERS_BODY.size:
            raise IndexDamaged(f"the counters have {len(raw)} bytes, expected {start + _COUNTERS_BODY.size}")
        return cls(*_COUNTERS_BODY.unpack_from(raw, start))


def encode_sweep() -> bytes:
    """Encode the note that the index was found damaged and is still to be set right."""
    return frame(_SWEEP, SWEEP_KEY, b"")


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A save that takes several transactions: where it is, and which process is at it.

    There is exactly one for each incomplete checkpoint.

    Attributes
    ----------
    save_id : int
        The save's.
    node : int
        The node that holds the checkpoint; while rows are written, that which holds the last of them.
    position : int
        The checkpoint's; 0 while rows are written.
    pid : int
        The process, in the PID namespace that all who have the store open share.
    started : int
        When it was started: field 22 of /proc/PID/stat, 0 where that can't be read.
    boot : bytes
        The kernel's boot id, 16 bytes; zeros where it can't be read.
    """

    save_id: int
    node: int
    position: int
    pid: int
    started: int
    boot: bytes

    @staticmethod
    def key_of(save_id: int) -> bytes:
        """Key of `meta` for a save."""
        return SAVE_PREFIX + _SAVE_ID.pack(save_id)

    def encode(self) -> bytes:
        """Encode as the value of `meta` under `key_of(save_id)`."""
        body = _SAVE_BODY.pack(self.node, self.position, self.pid, self.started, self.boot)
        return frame(_SAVE, self.key_of(self.save_id), body)

    @classmethod
    def decode(cls, key: bytes, raw: bytes) -> SaveRecord:
        """Decode; raises IndexDamaged."""
        start = unframe(_SAVE, key, raw)
        if len(raw) != start + _SAVE_BODY.size or len(key) != len(SAVE_PREFIX) + _SAVE_ID.size:
            raise IndexDamaged(f"the record of a save under {key.hex()} has {len(raw)} bytes, expected {start + _SAVE_BODY.size}")
        return cls(_SAVE_ID.unpack_from(key, len(SAVE_PREFIX))[0], *_SAVE_BODY.unpack_from(raw, start))


@dataclass(frozen=True, slots=True)
class RootRecord:
    """What a root stands for, in few bytes: all namespaces are looked over before a save evicts.

    Attributes
    ----------
    root : int
        The root's node id.
    namespace : bytes
        The id of its namespace.
    block_pages, states_pages : int
        Pages of a full block of rows, and of a full block of states (0 for a layout without states).
    """

    root: int
    namespace: bytes
    block_pages: int
    states_pages: int

    @property
    def key(self) -> bytes:
        """Key of `roots`: the root's node id, big-endian."""
        return self.root.to_bytes(8, "big")

    def encode(self) -> bytes:
        """Encode as the value of `roots`."""
        return frame(_ROOT, self.key, _ROOT_BODY.pack(self.namespace, self.block_pages, self.states_pages))

    @classmethod
    def decode(cls, root: int, raw: bytes) -> RootRecord:
        """Decode; raises IndexDamaged."""
        start = unframe(_ROOT, root.to_bytes(8, "big"), raw)
        if len(raw) != start + _ROOT_BODY.size:
            raise IndexDamaged(f"the record of root {root} has {len(raw)} bytes, expected {start + _ROOT_BODY.size}")
        return cls(root, *_ROOT_BODY.unpack_from(raw, start))


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace: its root in the radix index, its layout, the digest of its salt (the salt itself is never stored)."""

    namespace: bytes
    root: int
    created: int
    salt: bytes
    layout: bytes

    def encode(self) -> bytes:
        """Encode as the value of `namespaces` under the namespace's id."""
        body = _NAMESPACE_BODY.pack(self.root, self.created, self.salt, len(self.layout)) + self.layout
        return frame(_NAMESPACE, self.namespace, body)

    @classmethod
    def decode(cls, namespace: bytes, raw: bytes) -> NamespaceRecord:
        """Decode; raises IndexDamaged."""
        start = unframe(_NAMESPACE, namespace, raw)
        if len(raw) < start + _NAMESPACE_BODY.size:
            raise IndexDamaged(f"the record of namespace {namespace.hex()} is too short")
        root, created, salt, length = _NAMESPACE_BODY.unpack_from(raw, start)
        layout = raw[start + _NAMESPACE_BODY.size :]
        if len(layout) != length:
            raise IndexDamaged(f"the record of namespace {namespace.hex()} holds {len(layout)} bytes of layout, says {length}")
        return cls(namespace, root, created, salt, layout)
