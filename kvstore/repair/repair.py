"""Repair: in place where the structure of the file is sound, else by writing anew what verifies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore.env import exclusive_environment, exclusive_files
from kvstore.env.replacing import clear_leftovers
from kvstore.errors import NotAStoreError, StoreDamagedError
from kvstore.layout import Layout
from kvstore.records.constants import OPEN_LOCK_FILE, WRITE_LOCK_FILE
from kvstore.repair.mend import NEEDS_LAYOUT, Mended, mend
from kvstore.repair.result import RepairResult
from kvstore.repair.salvage import salvage

__all__ = ["repair"]

_PURPOSE = "repair"

Progress = Callable[[str, int, int], None]


def repair(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    namespaces: Iterable[tuple[Layout, bytes]] = (),
    dry_run: bool = False,
    lock_timeout: float = 10.0,
    any_owner: bool = False,
    any_filesystem: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """See `Store.repair`."""
    started = time.perf_counter()
    home = Path(os.path.realpath(os.fspath(path)))
    had_locks = all((home / name).exists() for name in (OPEN_LOCK_FILE, WRITE_LOCK_FILE))
    rewritten = True
    try:
        with exclusive_environment(
            home, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem, purpose=_PURPOSE
        ) as environment:
            if not dry_run:
                clear_leftovers(home)
            mended = mend(environment, lock_timeout=lock_timeout, dry_run=dry_run, progress=progress)
            cap = environment.record.cap
        if not mended.left:
            return _in_place(str(home), mended, cap, started=started)
        problems = [f"{problem.where}: {problem.what}" for problem in mended.left]
        rewritten = not dry_run or any(problem.where.startswith(NEEDS_LAYOUT) for problem in mended.left)
    except (StoreDamagedError, NotAStoreError) as error:
        problems = [str(error)]
        ours = had_locks and isinstance(error, StoreDamagedError)
    else:
        ours = True
    with exclusive_files(home, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem, purpose=_PURPOSE):
        done = salvage(
            home,
            max_bytes=max_bytes,
            namespaces=namespaces,
            is_store=ours,
            dry_run=dry_run,
            lock_timeout=lock_timeout,
            progress=progress,
        )
    return RepairResult(
        path=str(home),
        problems=(*problems, *done.notes),
        changed=not dry_run,
        rewritten=rewritten,
        moved_to=done.moved_to,
        sessions_kept=done.kept.sessions,
        sessions_lost=done.lost.sessions,
        nodes_kept=done.kept.nodes,
        nodes_lost=done.lost.nodes,
        tokens_kept=done.held.tokens,
        tokens_lost=done.lost.tokens,
        blocks_kept=done.held.blocks,
        blocks_lost=done.lost.blocks,
        kept_bytes=done.held.payload_bytes,
        max_bytes=done.cap,
        seconds=time.perf_counter() - started,
    )


def _in_place(path: str, mended: Mended, cap: int, *, started: float) -> RepairResult:
    before, after = mended.before, mended.after
    return RepairResult(
        path=path,
        problems=tuple(f"{problem.where}: {problem.what}" for problem in mended.problems),
        changed=bool(mended.problems),
        rewritten=False,
        moved_to="",
        sessions_kept=len(before.ends & after.ends),
        sessions_lost=len(before.ends - after.ends),
        nodes_kept=after.nodes,
        nodes_lost=max(before.nodes - after.nodes, 0),
        tokens_kept=after.tokens,
        tokens_lost=max(before.tokens - after.tokens, 0),
        blocks_kept=after.blocks,
        blocks_lost=max(before.blocks - after.blocks, 0),
        kept_bytes=after.payload_bytes,
        max_bytes=cap,
        seconds=time.perf_counter() - started,
    )
