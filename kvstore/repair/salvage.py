"""A store whose structure is damaged: what verifies is written into a new file, the damaged one is moved aside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.check import verify_contents
from kvstore.env import map_bytes_for, open_environment, verify_file
from kvstore.env.damaged import DamagedFile, Meta, read_metas
from kvstore.env.lost_meta import rebuild_meta
from kvstore.env.replacing import clear_leftovers, make_beside, remove_new, replace_file
from kvstore.errors import CapError, ForkedStoreError, NotAStoreError, StoreDamagedError
from kvstore.layout import Layout
from kvstore.records.constants import DATA_FILE, DEFAULT_PAGE_BYTES, LOCK_RESERVE, PAGE_HEADER, PAYLOAD_ALIGN
from kvstore.records.meta import STORE_KEY, StoreRecord
from kvstore.repair.blocks import BlockReader
from kvstore.repair.mend import Held, held
from kvstore.repair.rebuild import Kept, Rebuild, Trial, keep_all
from kvstore.repair.records import Records, Space, read_records
from kvstore.repair.scan import Found, scan_file
from kvstore.repair.sessions import Sessions
from kvstore.scope import StoreScope
from kvstore.staging import BufferPool

__all__ = ["Salvaged", "salvage"]

_PAGE_SIZES = (4096, 8192, 16384, 32768)
_METAS = 2
_TRIAL_POOL = 32 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What was kept of a damaged file, what could be named of the rest, and where the file is now."""

    kept: Kept
    held: Held
    lost: Held
    cap: int
    moved_to: str
    notes: tuple[str, ...]


def salvage(
    home: Path,
    *,
    max_bytes: int | None,
    namespaces: Iterable[tuple[Layout, bytes]],
    is_store: bool,
    dry_run: bool,
    lock_timeout: float,
    progress: Progress | None,
) -> Salvaged:
    """Keep what verifies of a store. For who holds its files exclusively.

    Parameters
    ----------
    max_bytes : int or None
        The cap of the new file if the damaged one doesn't say any more what it was.
    namespaces : iterable of (Layout, bytes)
        Layouts and salts that are known from elsewhere, for namespaces whose records are lost.
    is_store : bool
        Whether something else than the data file says that this is a store.

    Raises
    ------
    NotAStoreError, FormatVersionError
        When it is no store, or one of another version. It is left as it is.
    StoreFullError
        When there is no room beside the store.
    CapError
        When the cap is lost and none is given.
    StoreDamagedError
        When what was written does not verify; the store is left as it is.
    """
    pid = os.getpid()
    if not dry_run:
        clear_leftovers(home)
    file = DamagedFile(str(home / DATA_FILE))
    try:
        metas = read_metas(file)
        found = scan_file(file, (metas[0].page_bytes,) if metas else _PAGE_SIZES, progress)
        meta, records = _snapshot(file, metas, found, [Space.of(layout, salt) for layout, salt in namespaces])
        if records.foreign_version is not None:
            raise records.foreign_version
        if not records.is_store and not is_store:
            raise NotAStoreError(f"{home / DATA_FILE} holds nothing of a kvstore; it was left as it is")
        store = _identity(records, meta, max_bytes)
        sessions = Sessions(file, records)
        if dry_run:
            return _look(file, found, sessions, store, progress)
        return _rewrite(home, file, found, sessions, store, lock_timeout, progress, pid)
    finally:
        file.close()


def _snapshot(file: DamagedFile, metas: list[Meta], found: Found, known: list[Space]) -> tuple[Meta | None, Records]:
    """The snapshot to go by: the newest one, unless it is damaged and more is left of the one before; else what can be guessed."""
    rebuilt = _rebuilt(file, metas, found) if len(metas) < _METAS else None
    newest = metas[0].transaction if metas else -1
    if rebuilt is not None and rebuilt.transaction > newest:
        records = read_records(file, rebuilt, found, known, rebuilt=True)
        if records.whole:
            return rebuilt, records
    best: tuple[Meta | None, Records] | None = None
    for meta in metas:
        records = read_records(file, meta, found, known, rebuilt=False)
        if best is None or _worth(file, records) > _worth(file, best[1]):
            best = meta, records
        if best[1].whole:
            break
    if best is not None and (best[1].whole or best[1].edges):
        return best
    rebuilt = rebuilt or _rebuilt(file, metas, found)
    if rebuilt is not None:
        return rebuilt, read_records(file, rebuilt, found, known, rebuilt=True)
    return best or (None, read_records(file, None, found, known, rebuilt=True))


def _rebuilt(file: DamagedFile, metas: list[Meta], found: Found) -> Meta | None:
    """A snapshot whose meta page is lost."""
    last_page = metas[0].last_page if len(metas) == _METAS else None
    every = (rebuild_meta(file, size, leaves.tolist(), last_page) for size, leaves in found.leaves.items())
    return next((meta for meta in every if meta is not None), None)


def _worth(file: DamagedFile, records: Records) -> int:
    return sum(edge.end - edge.start for edge in Sessions(file, records).edges.values())


def _identity(records: Records, meta: Meta | None, max_bytes: int | None) -> StoreRecord:
    """What the new file says of itself: what the damaged one says, as far as that can be found."""
    candidates = [] if records.store is None else [records.store]
    old = sorted(records.old_stores, key=lambda record: -record.generation)
    candidates += [r for r in old if meta is not None and _map_bytes(r.cap, r.page_bytes) == meta.map_bytes]
    if meta is not None and meta.map_bytes and not candidates:
        page_bytes, cap = meta.page_bytes, meta.map_bytes + LOCK_RESERVE
        known = old[0] if old else StoreRecord(os.urandom(16), 1, cap, page_bytes, 0)
        candidates.append(replace(known, cap=cap, page_bytes=page_bytes))
    candidates += old
    for record in candidates:
        if _map_bytes(record.cap, record.page_bytes):
            return record
    if max_bytes is None:
        raise CapError("the store's cap is lost with the pages that held it; say what it was (max_bytes, or --max-bytes)")
    map_bytes_for(max_bytes, DEFAULT_PAGE_BYTES)
    return StoreRecord(os.urandom(16), 1, max_bytes, meta.page_bytes if meta is not None else DEFAULT_PAGE_BYTES, 0)


def _map_bytes(cap: int, page_bytes: int) -> int:
    """The map size that goes with a cap; 0 where there is none."""
    try:
        return map_bytes_for(cap, page_bytes) if page_bytes in _PAGE_SIZES else 0
    except CapError:
        return 0


def _look(file: DamagedFile, found: Found, sessions: Sessions, store: StoreRecord, progress: Progress | None) -> Salvaged:
    target = Trial()
    reader = BlockReader(file, found, BufferPool(_TRIAL_POOL, align=PAYLOAD_ALIGN, skew=PAGE_HEADER), target.value_bytes)
    try:
        kept = keep_all(sessions, reader, target, progress)
    finally:
        reader.close()
    now = Held(kept.sessions, kept.nodes, kept.tokens, len(reader.kept), reader.read_bytes)
    return Salvaged(kept, now, _lost(sessions, kept, reader), store.cap, "", _notes(file, sessions))


def _rewrite(
    home: Path,
    file: DamagedFile,
    found: Found,
    sessions: Sessions,
    store: StoreRecord,
    lock_timeout: float,
    progress: Progress | None,
    pid: int,
) -> Salvaged:
    _check_forked(pid)
    beside = make_beside(home, min(_needed(found, sessions, store.page_bytes), file.size))
    try:
        environment = open_environment(
            beside,
            max_bytes=store.cap,
            lock_timeout=lock_timeout,
            page_bytes=store.page_bytes,
            any_filesystem=True,  # that of the damaged one, which was looked at
            whole_cap=False,
        )
        try:
            target = Rebuild(StoreScope(environment, lock_timeout))
            reader = BlockReader(file, found, target.store.pool, target.value_bytes)
            try:
                kept = keep_all(sessions, reader, target, progress)
            finally:
                reader.close()
            target.write_uses()
            with environment.write(lock_timeout) as txn:
                txn.put(txn.db.meta, STORE_KEY, replace(store, generation=store.generation + 1).encode())
            with environment.reading() as reading:
                problems = [
                    problem.where + ": " + problem.what
                    for problem in verify_contents(environment, reading, deep=True, progress=progress)
                ]
                now = held(reading)
        finally:
            environment.release()
        _check_forked(pid)
        problems += verify_file(str(beside / DATA_FILE))
        if problems:
            raise StoreDamagedError(f"what was kept does not verify ({problems[0]}); the store is left as it is")
        moved_to = replace_file(home, beside / DATA_FILE)
    finally:
        if os.getpid() == pid:
            remove_new(home)
    return Salvaged(kept, now, _lost(sessions, kept, reader), store.cap, str(moved_to), _notes(file, sessions))


def _check_forked(pid: int) -> None:
    """The locks are the parent's, and so is what it has written: a child that was forked meanwhile leaves all of it alone."""
    if os.getpid() != pid:
        raise ForkedStoreError("this process was forked in the middle of a repair, which goes on in the parent; leave it to that")


def _needed(found: Found, sessions: Sessions, page_bytes: int) -> int:
    """Bytes that the new file may take: one copy of each block, in whole pages, and the index."""
    headers = (places[0].header for places in found.blocks.values())
    pages = sum(-(-(PAGE_HEADER + header.padded_bytes + header.payload_bytes) // page_bytes) for header in headers)
    return pages * page_bytes + 2 * sum(edge.length for edge in sessions.edges.values())


def _lost(sessions: Sessions, kept: Kept, reader: BlockReader) -> Held:
    """What was in the index and is not kept."""
    edges = sessions.records.edges.values()
    return Held(
        sessions=len(sessions.leaves) - kept.sessions,
        nodes=len(edges) - kept.nodes + sessions.records.unreadable_nodes,
        tokens=sum(edge.end - edge.start for edge in edges) - kept.tokens,
        blocks=len(reader.lost),
        payload_bytes=0,
    )


def _notes(file: DamagedFile, sessions: Sessions) -> tuple[str, ...]:
    """What was met on the way, for people."""
    notes = []
    if file.unreadable:
        notes.append(f"{file.unreadable} sectors of 4 KiB can't be read")
    records = sessions.records
    used = {records.roots.get(edge.root, b"") for edge in records.edges.values()} - {b""}
    notes += [
        f"namespace {lost.hex()} has lost its layout, and so its sessions: give it and the salt to Store.repair (namespaces=...)"
        for lost in sorted(used - records.spaces.keys())
    ]
    if sessions.lost:
        notes.append(f"{sessions.lost} nodes of the index hang on nothing any more")
    return tuple(notes)
