"""The store: opening and closing, namespaces, statistics, verification."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from kvstore.blocks import offset_of
from kvstore.check import Problem, Progress, verify_contents
from kvstore.env import acquire_environment
from kvstore.errors import StoreBusyError, StoreClosedError
from kvstore.ids import ID_BYTES
from kvstore.layout import Layout
from kvstore.radix import CheckpointPolicy
from kvstore.records.meta import NamespaceRecord
from kvstore.repair import RepairResult, repair
from kvstore.scope import NamespaceScope, StoreScope
from kvstore.store.namespace import EvictResult, Namespace, evict_all
from kvstore.store.resize import resize
from kvstore.store.stats import NamespaceInfo, StoreStats, gather_stats, list_namespaces

__all__ = ["Store", "VerifyResult"]

_LONGEST_TIMEOUT = 1e6  # seconds; what locks take
_guard = threading.Lock()


def _open_scope(
    path: str | os.PathLike[str], max_bytes: int | None, lock_timeout: float, any_owner: bool, any_filesystem: bool
) -> StoreScope:
    environment = acquire_environment(
        path, max_bytes=max_bytes, lock_timeout=lock_timeout, any_owner=any_owner, any_filesystem=any_filesystem
    )
    with _guard:
        scope = environment.companion
        if not isinstance(scope, StoreScope):
            scope = environment.companion = StoreScope(environment, lock_timeout)
    return scope


def _after_fork_in_child() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found.

    Attributes
    ----------
    problems : tuple of Problem
        Empty when everything agrees.
    blocks, nodes : int
        How many were checked.
    deep : bool
        Whether every byte of every block was read and hashed.
    seconds : float
        Wall time.
    """

    problems: tuple[Problem, ...]
    blocks: int
    nodes: int
    deep: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems


class Store:
    """A handle on a store: a directory on a local file system that many processes have open at once. Thread-safe.

    Made by `Store.open`; used as a context manager, or closed with `close`. Opening a store twice in one process gives two
    handles on the same open file. After a fork, handles, namespaces, leases and tiers from before it stay the parent's: in the
    child they raise ForkedStoreError, and the child opens the store for itself.
    """

    def __init__(self, scope: StoreScope, *, any_owner: bool = False, any_filesystem: bool = False) -> None:
        self._scope = scope
        self._any_owner = any_owner
        self._any_filesystem = any_filesystem
        self._closed = False
        self._close_guard = threading.RLock()  # re-entrant: a handler of signals, or of progress, may close it
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        lock_timeout: float = 10.0,
        any_owner: bool = False,
        any_filesystem: bool = False,
    ) -> Store:
        """Open a store, or create one.

        Parameters
        ----------
        path : str or path-like
            A directory on a local file system; not on a network file system, where LMDB's locks break. It is made with mode
            0700 if it isn't there.
        max_bytes : int, optional
            The cap: the most that the directory ever takes on disk. Needed to create a store; the file grows up to it and
            never shrinks. For a store that exists, None takes the stored cap, and another value is refused.
        lock_timeout : float
            Seconds that opening and every write wait for other processes before they give up with a named error. Handles of
            one process on one store share that of the first.
        any_owner : bool
            Trust files that belong to another user, and a directory that belongs to one other than this or root.
        any_filesystem : bool
            Go on, at your own risk, on a file system that is refused by its type: right for a folder of the host in a virtual
            machine, if nothing outside this one kernel ever opens the store.

        Raises
        ------
        StoreMissingError
            There is no store and no `max_bytes`.
        NotAStoreError
            The path is a file, or a directory that holds something else.
        StoreDamagedError
            The file is truncated, or its structure is damaged.
        FormatVersionError
            The store is of a version that this code does not read.
        StoreOwnerError
            The directory isn't writable, or its files belong to another user or are symbolic links.
        CapError
            `max_bytes` is too small, another than the stored one, or more than the disk has for a new store.
        SharingError
            The file system isn't a local one, or the store is in use by another kernel or from another PID namespace.
        StoreBusyError
            Another process holds the store exclusively (verifying or resizing it) for too long.
        """
        timeout = min(max(float(lock_timeout), 0.0), _LONGEST_TIMEOUT)
        scope = _open_scope(path, max_bytes, timeout, any_owner, any_filesystem)
        return cls(scope, any_owner=any_owner, any_filesystem=any_filesystem)

    def __enter__(self) -> Store:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.path} {'closed' if self._closed else 'open'}>"

    @property
    def path(self) -> str:
        """The store's directory."""
        return self._scope.environment.path

    @property
    def max_bytes(self) -> int:
        """The cap."""
        return self._scope.environment.record.cap

    def close(self) -> None:
        """Close this handle. Idempotent. Views of leases stay valid: the file is closed with the last of them."""
        if self._pid != os.getpid():  # the parent's; another thread of it may have held the guard at the fork
            self._closed = True
            return
        with self._close_guard:
            if self._closed:
                return
            self._closed = True
        if not self._scope.environment.closed:
            try:
                self._scope.write_pending(timeout=1.0)
            finally:
                self._scope.environment.release()

    def _check_open(self) -> StoreScope:
        self._scope.environment.check_open()
        if self._closed:
            raise StoreClosedError(f"this handle of the store at {self.path} is closed; open it again")
        return self._scope

    def namespace(self, layout: Layout, *, salt: bytes = b"", checkpoints: CheckpointPolicy | None = None) -> Namespace:
        """Get the namespace of a layout and a salt. It comes into being with its first save and goes with its last session.

        Parameters
        ----------
        layout : Layout
            What a session consists of.
        salt : bytes
            Anything else that changes the state: a tenant, a LoRA, a control vector. Only its digest is stored.
        checkpoints : CheckpointPolicy, optional
            Which checkpoints a session keeps, for a layout with states. By default what this process's latest handle on the
            namespace was given, or else `CheckpointPolicy()`.

        Raises
        ------
        CapError
            When the cap leaves no room to work with blocks of this layout.
        TypeError
            When the salt isn't bytes, or `checkpoints` no policy.
        """
        scope = self._check_open()
        if not isinstance(salt, bytes | bytearray | memoryview):
            raise TypeError(f"salt must be bytes, got {type(salt).__name__}; encode it")
        if not isinstance(checkpoints, CheckpointPolicy | None):
            raise TypeError(f"checkpoints must be a CheckpointPolicy, got {type(checkpoints).__name__}")
        return Namespace(NamespaceScope.of(scope, layout, bytes(salt), checkpoints), self._check_open)

    def namespaces(self) -> list[NamespaceInfo]:
        """Describe every namespace in the store. Reads the whole index once."""
        return list_namespaces(self._check_open())

    def stats(self) -> StoreStats:
        """Count what the store holds."""
        return gather_stats(self._check_open())

    def evict(self, *, free_bytes: int) -> EvictResult:
        """Evict the sessions least worth keeping until about `free_bytes` more bytes are free.

        The file does not shrink; the pages are written to again. What saves under way have stored so far stays.

        Parameters
        ----------
        free_bytes : int
            How many bytes of pages to free; more than there are evicts everything else.

        Raises
        ------
        WriteLockTimeout, StoreFullError
        """
        scope = self._check_open()
        page_bytes = scope.environment.page_bytes
        with scope.environment.reading() as txn:
            before = txn.live_pages()
        removed = scope.evict_down(max(before - -(-max(free_bytes, 0) // page_bytes), 0))
        return EvictResult(removed.nodes, removed.tokens, removed.pages * page_bytes)

    def evict_namespace(self, namespace_id: bytes) -> EvictResult:
        """Evict everything of a namespace, named by its id (see `namespaces`), whatever its layout.

        Raises
        ------
        KeyError
            When there is no such namespace.
        """
        scope = self._check_open()
        with scope.environment.reading() as txn:
            raw = txn.get(namespace_id, txn.db.namespaces) if len(namespace_id) == ID_BYTES else None
        if raw is None:
            raise KeyError(namespace_id.hex())
        return evict_all(scope, NamespaceRecord.decode(namespace_id, raw).root)

    def resize(self, max_bytes: int, *, progress: Progress | None = None) -> StoreStats:
        """Change the cap. Needs the store for itself: no other handle, lease, view or cascade in this process, no other process.

        Raising it is quick. Lowering it evicts down to the new limit and writes the store anew beside its directory, for which
        the file system must have room. The handle goes on with the new file; namespaces and tiers made from it before are closed
        with the old one, and say so. After a refusal the handle goes on as well, with the old cap.

        Parameters
        ----------
        max_bytes : int
            The new cap.
        progress : callable, optional
            Called with (what, done, total).

        Raises
        ------
        StoreBusyError
            When something else uses the store.
        CapError
            When the new cap is too small, or higher than the disk has room for.
        StoreFullError
            When lowering finds no room for both files.
        """
        self._check_open()  # first, since in a forked child a thread that isn't there may hold the guard
        with self._close_guard:
            scope = self._check_open()
            environment = scope.environment
            if environment.shared:
                raise StoreBusyError(
                    f"the store at {self.path} is used by more than this handle in this process; end its other handles, leases, "
                    "views and cascades before you resize it"
                )
            scope.write_pending(timeout=1.0)
            environment.release()
            if environment.closed:
                environment.ended = "was resized, which closes what was made from it before; make it anew from the store"
            trust = {"any_owner": self._any_owner, "any_filesystem": self._any_filesystem}
            try:
                resize(environment.path, max_bytes, lock_timeout=scope.lock_timeout, progress=progress, **trust)
            finally:
                if self._pid == os.getpid():
                    self._scope = _open_scope(environment.path, None, scope.lock_timeout, self._any_owner, self._any_filesystem)
                    if self._closed:  # meanwhile
                        self._scope.environment.release()
        return gather_stats(self._check_open())

    @classmethod
    def repair(
        cls,
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
        """Move aside what can't be trusted of a store that nobody has open, this process included, and keep what verifies.

        Reads and hashes every byte. Sessions keep what comes before their first damaged block. Where only blocks or records are
        damaged this is done in place; where the structure of the file is, what verifies is written into a new one, for which the
        file system must have room, and the damaged file is moved to a directory beside the store (`NAME.damaged-DATE-TIME`).
        Killed at any instant it leaves the damaged store or the repaired one. A sound store is not changed.

        Parameters
        ----------
        max_bytes : int, optional
            The cap of the new file, if the damaged one doesn't say any more what it was.
        namespaces : iterable of (Layout, bytes), optional
            Layouts with their salts, for the case that a namespace's own record is lost: without its layout none of its sessions
            can be kept.
        dry_run : bool
            Change nothing; say what is wrong and what would be kept.
        lock_timeout : float
            Seconds to wait for other processes.
        any_owner, any_filesystem : bool
            As of `open`.
        progress : callable, optional
            Called with (what, done, total).

        Raises
        ------
        NotAStoreError, StoreMissingError, FormatVersionError
            There is no store, or one of another version. It is left as it is.
        StoreBusyError
            The store is open somewhere.
        StoreFullError
            There is no room for the new file.
        CapError
            The cap is lost and none is given.
        """
        timeout = min(max(float(lock_timeout), 0.0), _LONGEST_TIMEOUT)
        return repair(
            path,
            max_bytes=max_bytes,
            namespaces=namespaces,
            dry_run=dry_run,
            lock_timeout=timeout,
            any_owner=any_owner,
            any_filesystem=any_filesystem,
            progress=progress,
        )

    def verify(self, *, deep: bool = False, progress: Progress | None = None) -> VerifyResult:
        """Check that all records agree; with `deep`, that every block's bytes hash to its id. Others may work meanwhile.

        Blocks that fail are refused from then on, and marked in the store.

        Parameters
        ----------
        deep : bool
            Read and hash every byte.
        progress : callable, optional
            Called with (what, done, total).
        """
        scope = self._check_open()
        started = time.perf_counter()
        environment = scope.environment
        with environment.reading() as txn:
            problems = verify_contents(environment, txn, deep=deep, progress=progress)
            blocks, nodes = txn.entries(txn.db.refs), txn.entries(txn.db.nodes)
            for problem in problems:
                if problem.block_id:
                    scope.refuse(problem.block_id, offset_of(txn, problem.block_id))
        if problems and scope.pending:
            scope.write_pending(timeout=scope.lock_timeout)
        return VerifyResult(tuple(problems), blocks, nodes, deep, time.perf_counter() - started)
