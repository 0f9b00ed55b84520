"""Taking the lock of an open store, and telling who shares it: processes that LMDB's reader table can tell apart, or none.

The table knows readers by their process ids. In another PID namespace (two containers that share a volume) the same number is
another process: it finds "its" locks taken, and a dead reader of that number is never cleared. Another kernel (a virtual machine,
a file system that several machines mount) shares no lock at all. So who holds open.lock exclusively writes down where it runs, and
who comes to share it compares.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable

from kvstore.errors import SharingError, StoreBusyError
from kvstore.locks import FileLock
from kvstore.records.constants import HOLDER_MAGIC

__all__ = ["check_holder", "enter", "holder", "share", "write_holder"]

_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_LONGEST = 256
_PAUSE = 0.01


def enter(lock: FileLock, directory: str, timeout: float, *, ready: Callable[[], bool]) -> bool:
    """Take the lock of a store that is being opened; return whether it is held exclusively, which makes this the first opener.

    Parameters
    ----------
    ready : callable
        Whether there is a store to share. Where who was creating it has died, several that waited come in at once: one of them has
        to be alone to finish it.

    Raises
    ------
    StoreBusyError
        When somebody held it exclusively for all of `timeout` seconds, or others came and went and nobody was alone.
    SharingError
        When who holds it runs where LMDB can't tell it from processes here.
    """
    deadline = time.monotonic() + timeout
    compared = False
    while True:
        if lock.acquire(exclusive=True, timeout=0):
            write_holder(lock)
            return True
        if lock.acquire(exclusive=False, timeout=0):
            try:
                check_holder(lock, directory)
            except SharingError:
                lock.release()
                if compared:
                    raise
                compared = True  # the one who wrote that may have gone just now
                continue
            if ready():
                return False
            lock.release()
            why = f"the store in {directory} is not created yet, and other processes are about to; try again"
        else:
            why = (
                f"another process has held {directory} exclusively for over {timeout} s (verifying, resizing or repairing it); "
                "try later"
            )
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreBusyError(why)
        time.sleep(min(random.uniform(_PAUSE / 10, _PAUSE), left))  # not in step with others who wait to be alone


def share(lock: FileLock, directory: str, timeout: float) -> None:
    """Go from the exclusive lock to the shared one. Another may take it in between, so it is compared again.

    Raises
    ------
    StoreBusyError, SharingError
    """
    if not lock.acquire(exclusive=False, timeout=timeout):
        raise StoreBusyError(f"another process took {directory} exclusively; try later")
    check_holder(lock, directory)


def write_holder(lock: FileLock) -> None:
    """Write down where this process runs. It holds the lock exclusively. A file that something else is in is left alone."""
    there = holder(lock)[: len(HOLDER_MAGIC)].rstrip(b"\0")  # zeros are what a power loss may leave
    if not HOLDER_MAGIC.startswith(there):
        return
    lock.write(b"".join(b"%s %s\n" % pair for pair in [(HOLDER_MAGIC, b"1"), *_here().items()]))


def holder(lock: FileLock) -> bytes:
    """What is written down: it stays the same for as long as the lock is shared."""
    return lock.read(_LONGEST)


def check_holder(lock: FileLock, directory: str) -> None:
    """Refuse to share a store with a holder that runs elsewhere. What it doesn't say, or in another form, is not compared.

    Raises
    ------
    SharingError
    """
    there, here = _parse(holder(lock)), _here()
    if not _agree(there, here, b"boot"):
        raise SharingError(
            f"the store at {directory} is in use by another kernel (its boot id is {_text(there, b'boot')}, here it is "
            f"{_text(here, b'boot')}): LMDB's locks don't reach there; use a store from one machine only, each its own"
        )
    if not _agree(there, here, b"pid-namespace"):
        raise SharingError(
            f"the store at {directory} is in use from another PID namespace ({_text(there, b'pid-namespace')}, here it is "
            f"{_text(here, b'pid-namespace')}): LMDB tells readers apart by process ids, which mean other processes there; let "
            "the containers share one PID namespace (--pid=host, --pid=container:NAME, shareProcessNamespace), or give each a "
            "store of its own"
        )


def _agree(there: dict[bytes, bytes], here: dict[bytes, bytes], what: bytes) -> bool:
    return what not in there or what not in here or there[what] == here[what]


def _text(where: dict[bytes, bytes], what: bytes) -> str:
    return where[what].decode("ascii", "replace")


def _here() -> dict[bytes, bytes]:
    """Which kernel and which PID namespace this process runs in, as far as the system says."""
    found = {}
    with contextlib.suppress(OSError), open(_BOOT, "rb") as file:
        found[b"boot"] = file.read(64).strip()
    with contextlib.suppress(OSError):
        found[b"pid-namespace"] = b"%d" % os.stat(_NAMESPACE).st_ino
    return {what: value for what, value in found.items() if value and b" " not in value}


def _parse(raw: bytes) -> dict[bytes, bytes]:
    lines = [line.split(b" ") for line in raw.split(b"\n")[:-1]]
    if not lines or any(len(line) != 2 for line in lines) or lines[0] != [HOLDER_MAGIC, b"1"]:
        return {}
    return {line[0]: line[1] for line in lines[1:]}
