"""Which process is which: a number alone is given to another one later, after a reboot to any."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "is_running", "this_process"]

_NO_BOOT = bytes(16)
_THREADS, _STARTED = 17, 19  # of what follows the name in /proc/PID/stat: its fields 20 and 22


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine, for as long as it runs and no longer.

    Attributes
    ----------
    pid : int
        Its number.
    started : int
        When it was started, in clock ticks since the boot; 0 where that can't be read.
    boot : bytes
        The kernel's boot id, 16 bytes; zeros where it can't be read.
    """

    pid: int
    started: int
    boot: bytes


_this = Process(0, 0, _NO_BOOT)


def this_process() -> Process:
    """The calling process; after a fork, the child."""
    global _this
    pid = os.getpid()
    if _this.pid != pid:
        stat = _stat(pid)
        _this = Process(pid, 0 if stat is None else int(stat[_STARTED]), _boot())
    return _this


def is_running(process: Process) -> bool:
    """Whether a process still runs. In doubt it does; one that is stopped does, one that nobody has waited for yet does not."""
    this = this_process()
    if process == this:
        return True
    if _NO_BOOT not in (process.boot, this.boot) and process.boot != this.boot:
        return False
    stat = _stat(process.pid)
    if stat is None:  # none there, or not for us to see
        return _exists(process.pid)
    if process.started and int(stat[_STARTED]) != process.started:
        return False
    return stat[0] not in (b"Z", b"X", b"x") or int(stat[_THREADS]) > 1  # a main thread may end before the others


def _exists(pid: int) -> bool:
    if not pid:
        return False  # to `kill` that is our own group
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _stat(pid: int) -> list[bytes] | None:
    """What /proc says of a process, from its state on; None where it says nothing."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = raw[raw.rfind(b")") + 2 :].split()  # the name in front of it may hold anything
    return fields if len(fields) > _STARTED else None


def _boot() -> bytes:
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()).bytes
    except (OSError, ValueError):
        return _NO_BOOT
