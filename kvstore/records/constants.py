"""Every constant of the on-disk format, in one place. docs/format.md specifies what they stand for.

Nothing here may change without a new FORMAT_VERSION: old code refuses a newer version by name.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BLOCK_MAGIC",
    "DATABASES",
    "DATA_FILE",
    "DEFAULT_PAGE_BYTES",
    "FORMAT_VERSION",
    "HOLDER_MAGIC",
    "KIND_ENTRY",
    "KIND_ROWS",
    "KIND_STATES",
    "LMDB_LOCK_FILE",
    "LOCK_RESERVE",
    "MAX_READERS",
    "NEW_DATA_FILE",
    "OPEN_LOCK_FILE",
    "PAGE_HEADER",
    "PAYLOAD_ALIGN",
    "SPACER_REGION_PAGES",
    "SPACER_REGION_SHARE",
    "SPACER_STEP",
    "STORE_MAGIC",
    "TAIL_SIZES",
    "WRITE_LOCK_FILE",
    "inline_limit",
]

FORMAT_VERSION: Final = 1  # on disk
STORE_MAGIC: Final = b"kvstore\x00"  # on disk
BLOCK_MAGIC: Final = b"kvsblock"  # on disk
HOLDER_MAGIC: Final = b"kvstore-holder"  # on disk, in open.lock

# kinds of block; on disk
KIND_ROWS: Final = 1  # rows of all streams for consecutive positions
KIND_STATES: Final = 2  # a piece of the packed states of one checkpoint
KIND_ENTRY: Final = 3  # reserved: bytes under a key of the caller's

# named databases of the LMDB environment; on disk
DATABASES: Final = ("meta", "namespaces", "children", "nodes", "usage", "blocks", "refs", "bad", "roots", "spacers")

# files of a store's directory; on disk
DATA_FILE: Final = "data.mdb"
LMDB_LOCK_FILE: Final = "lock.mdb"
OPEN_LOCK_FILE: Final = "open.lock"
WRITE_LOCK_FILE: Final = "write.lock"
NEW_DATA_FILE: Final = "data.mdb.new"  # while it is being created

# 32 KiB: an edge's record stays inline up to half a page, the free list stays short, the verifier is quick
# (docs/architecture.md has the comparison with 16 KiB).
DEFAULT_PAGE_BYTES: Final = 32768
PAGE_HEADER: Final = 16  # bytes of LMDB 0.9's page header; a large value starts right behind it
PAYLOAD_ALIGN: Final = 4096  # on disk: a block's payload starts at a multiple of this in the file
TAIL_SIZES: Final = 16  # on disk in effect: a block's value is padded to one of this many sizes, so that freed runs fit again
MAX_READERS: Final = 510  # read transactions at once, over all processes; the first opener's number holds
SPACER_STEP: Final = 8  # every how many pages of the index region one stays in use
SPACER_REGION_SHARE: Final = 256  # the region is this part of the map, and at most as long as
SPACER_REGION_PAGES: Final = 1024
LOCK_RESERVE: Final = 128 << 10  # what the lock files and the directory itself may take of the cap

_NODE_HEADER = 8  # bytes of LMDB's own header in front of each key and value in a leaf page


def inline_limit(page_bytes: int, key_bytes: int) -> int:
    """The longest value that LMDB 0.9 keeps inside a leaf page (mdb.c, me_nodemax: two entries must fit a page)."""
    node_max = ((page_bytes - PAGE_HEADER) // 2 & ~1) - 2
    return node_max - _NODE_HEADER - key_bytes
