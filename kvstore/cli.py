"""The command line: look into a store, verify it, make room in it, change its cap, repair it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.store import EvictResult, NamespaceInfo, Store

__all__ = ["main"]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _ago(last_use: int) -> str:
    if not last_use:
        return "never"
    seconds = max(time.time() - last_use / 1e6, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _parse_size(text: str) -> int:
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    digits = text.strip().lower().removesuffix("b").removesuffix("i")
    shift = units.get(digits[-1:], 0)
    try:
        return int(float(digits[:-1] if shift else digits) * (1 << shift))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write 500M, 10GiB or a number of bytes") from None


class _ProgressLine:
    """One line on standard error that says how far a long task is; only where somebody watches."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._shown = 0.0
        self._enabled = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._enabled and now - self._shown > 0.1:
            self._shown = now
            print(f"\r{self._doing} {what}: {done} of {total}   ", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def _stats(store: Store, args: argparse.Namespace) -> int:
    stats = store.stats()
    if args.json:
        _print_json(asdict(stats))
        return 0
    print(f"store       {stats.path} (format {stats.format_version})")
    print(f"cap         {_size(stats.max_bytes)}")
    print(f"on disk     {_size(stats.file_bytes)}")
    print(f"live        {_size(stats.live_bytes)} of at most {_size(stats.limit_bytes)} before saves evict")
    print(f"payload     {_size(stats.payload_bytes)} in {stats.blocks} blocks")
    print(f"index       {stats.nodes} nodes in {stats.namespaces} namespaces")
    print(f"bad blocks  {stats.bad_blocks}")
    return 0


def _ls(store: Store, args: argparse.Namespace) -> int:
    infos = store.namespaces()
    if args.json:
        _print_json([asdict(info) for info in infos])
        return 0
    if not infos:
        print("no namespaces")
        return 0
    rows = [("namespace", "sessions", "tokens", "B/token", "rows", "checkpoints", "states", "last use", "model"), *map(_row, infos)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(info: NamespaceInfo) -> tuple[str, ...]:
    return (
        info.namespace_id[:16],
        str(info.sessions),
        str(info.tokens),
        str(info.token_bytes),
        _size(info.rows_bytes),
        str(info.checkpoints),
        _size(info.states_bytes),
        _ago(info.last_use),
        info.model or "-",
    )


def _verify(store: Store, args: argparse.Namespace) -> int:
    line = _ProgressLine("verifying")
    try:
        result = store.verify(deep=args.deep, progress=line)
    finally:
        line.close()
    if args.json:
        problems = [{"where": p.where, "what": p.what, "block_id": p.block_id.hex()} for p in result.problems]
        _print_json(
            {
                "ok": result.ok,
                "problems": problems,
                "blocks": result.blocks,
                "nodes": result.nodes,
                "deep": result.deep,
                "seconds": result.seconds,
            }
        )
    else:
        for problem in result.problems:
            print(f"{problem.where}: {problem.what}")
        depth = "every byte" if result.deep else "records and headers (--deep reads every byte)"
        found = "no problems" if result.ok else f"{len(result.problems)} problems"
        print(f"{found}: {result.nodes} nodes, {result.blocks} blocks, {depth}, {result.seconds:.2f} s")
    return 0 if result.ok else 1


def _evict(store: Store, args: argparse.Namespace) -> int:
    if args.namespace:
        chosen = [info for info in store.namespaces() if info.namespace_id.startswith(args.namespace.lower())]
        if len(chosen) != 1:
            print(f"{len(chosen)} namespaces begin with {args.namespace!r}; see `kvstore ls`", file=sys.stderr)
            return 2
        result = store.evict_namespace(bytes.fromhex(chosen[0].namespace_id))
    else:
        result = store.evict(free_bytes=1 << 62 if args.all else args.bytes)
    _print_evicted(result, as_json=args.json)
    return 0


def _resize(store: Store, args: argparse.Namespace) -> int:
    before = store.stats()
    line = _ProgressLine("resizing:")
    try:
        after = store.resize(args.size, progress=line)
    finally:
        line.close()
    if args.json:
        _print_json(asdict(after))
        return 0
    print(f"cap         {_size(before.max_bytes)} before, {_size(after.max_bytes)} now")
    print(f"on disk     {_size(before.file_bytes)} before, {_size(after.file_bytes)} now")
    print(f"live        {_size(before.live_bytes)} before, {_size(after.live_bytes)} now")
    return 0


def _print_evicted(result: EvictResult, *, as_json: bool) -> None:
    if as_json:
        _print_json(asdict(result))
    else:
        print(f"evicted {result.nodes} nodes of {result.tokens} tokens, freed {_size(result.freed_bytes)}")


def _repair(args: argparse.Namespace) -> int:
    line = _ProgressLine("repairing:")
    try:
        result = Store.repair(
            args.path,
            max_bytes=args.max_bytes,
            dry_run=args.dry_run,
            any_owner=args.any_owner,
            any_filesystem=args.any_filesystem,
            progress=line,
        )
    finally:
        line.close()
    if args.json:
        _print_json({"ok": result.ok, **asdict(result)})
    elif result.ok:
        print(f"nothing to repair: {result.nodes_kept} nodes, {result.blocks_kept} blocks, every byte, {result.seconds:.2f} s")
    else:
        for problem in result.problems:
            print(problem)
        would = "would be " if args.dry_run else ""
        for what in ("sessions", "nodes", "tokens", "blocks"):
            kept, lost = getattr(result, f"{what}_kept"), getattr(result, f"{what}_lost")
            print(f"{what:<11} {kept} {would}kept, {lost} {would}lost")
        print(f"{'payload':<11} {_size(result.kept_bytes)} {would}kept")
        if result.moved_to:
            print(f"{'damaged':<11} file moved to {result.moved_to}")
        print(f"{'took':<11} {result.seconds:.2f} s")
    return 1 if args.dry_run and not result.ok else 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore", description="Look into a store of attention state, verify it, evict, resize it."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("stats", _stats, "what the store holds"),
        ("ls", _ls, "its namespaces, one a line"),
        ("verify", _verify, "check that everything agrees; exit status 1 if not"),
        ("evict", _evict, "remove sessions"),
        ("resize", _resize, "change the cap; nobody else may have the store open"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        _common(command, "the store's directory")
        if name == "verify":
            command.add_argument("--deep", action="store_true", help="read and hash every byte of every block")
        if name == "resize":
            command.add_argument("size", type=_parse_size, help="the new cap (100GiB, 500M or a number of bytes)")
        if name == "evict":
            what = command.add_mutually_exclusive_group(required=True)
            what.add_argument("--bytes", type=_parse_size, help="free at least this much, least recently used first (500M, 2GiB)")
            what.add_argument("--namespace", help="everything of the namespace whose id begins so")
            what.add_argument("--all", action="store_true", help="everything")
    repair = commands.add_parser("repair", help="keep what verifies of a damaged store", description=_REPAIR_TEXT)
    _common(repair, "the store's directory; nobody may have it open")
    repair.add_argument("--dry-run", action="store_true", help="change nothing, report; exit status 1 if there is damage")
    repair.add_argument("--max-bytes", type=_parse_size, help="the cap, if the store doesn't say any more what it was (500M, 2GiB)")
    return parser


def _common(command: argparse.ArgumentParser, path: str) -> None:
    """Give a command the arguments that all have."""
    command.add_argument("path", help=path)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--any-owner", action="store_true", help="trust files that belong to another user")
    command.add_argument("--any-filesystem", action="store_true", help="go on, at your own risk, on one that isn't local")


_REPAIR_TEXT = (
    "Move aside what can't be trusted of a damaged store and keep what verifies: in place if only blocks or records are damaged, "
    "else in a new file, beside which the damaged one is kept in a directory of its own (PATH.damaged-DATE-TIME)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 if problems were found and left, 2 for errors."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "repair":
            return _repair(args)
        with Store.open(args.path, any_owner=args.any_owner, any_filesystem=args.any_filesystem) as store:
            status: int = args.run(store, args)
            return status
    except (KVStoreError, OSError) as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 2
