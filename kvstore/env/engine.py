"""How LMDB is opened: the options that a store depends on, and why."""

from __future__ import annotations

import contextlib
import weakref

import lmdb

from kvstore.env import forks
from kvstore.env.descriptors import writing
from kvstore.env.transactions import translated
from kvstore.records.constants import MAX_READERS

__all__ = ["open_lmdb", "writer_of"]

_writers: weakref.WeakKeyDictionary[lmdb.Environment, int] = weakref.WeakKeyDictionary()


def open_lmdb(path: str, *, metasync: bool = True) -> lmdb.Environment:
    """Open the LMDB file in a directory as a store needs it. Takes the map size and page size that the file has.

    Without `metasync` a commit writes its pages, waits until they are on the disk, and writes its meta page, which is on the disk
    after the next commit's wait or `Environment.settle`. Pages that a transaction freed are used again by the next but one
    only, so a power loss in between undoes the last transaction and nothing else.

    - No writemap: a full disk would be SIGBUS and a truncated file would be filled with zeros in silence. What is SIGBUS without
      it, a page that can't be read, `MapFaults` answers.
    - Read-ahead stays on: without it touching a cold map was 20 to 33 times slower than the disk, and a compaction goes through
      this map. What it costs is small: a cold lease on 100,000 tokens takes 19 to 24 ms with it and 14 to 15 without, since a fault
      in the index brings 8 MiB along (3.1 ms, where a page alone takes 0.06). Payloads and headers don't come this way.
    - `meminit=False`: every byte of a value is ours, and clearing pages first cost a third of the write speed.
    - `max_spare_txns=0`: a cached read transaction would keep its slot across a fork.

    Raises
    ------
    ForkedStoreError
        When the file was open when this process was forked, and py-lmdb doesn't let it be opened again.
    """
    forks.remember(path)
    others = writing(path)  # the program's, and in a forked child those of the copies that it keeps
    with translated(), forks.opening_inherited(path) if forks.inherited(path) else contextlib.nullcontext():
        environment = lmdb.open(
            path,
            map_size=0,
            max_dbs=16,
            max_readers=MAX_READERS,
            max_spare_txns=0,
            meminit=False,
            metasync=metasync,
            readahead=True,
            mode=0o600,
            create=False,
        )
    forks.remember(path, environment)
    own = writing(path) - others
    _writers[environment] = own.pop() if len(own) == 1 else -1
    return environment


def writer_of(environment: lmdb.Environment) -> int:
    """The descriptor that LMDB writes pages by, for as long as the environment is open; -1 where that isn't plain.

    So it is where somebody else has opened the file for reading and writing in the same moment, or the system doesn't tell.
    """
    return _writers.get(environment, -1)
