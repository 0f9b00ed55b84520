"""What makes the figures of a run untrustworthy: seen before it starts, and what came in between."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benches.cgroup import PROC, Allowance, allowance
from benches.machine import MEMORY_FILE_SYSTEMS, Machine, available_memory, meminfo

__all__ = ["SYS", "Usage", "doubts_before", "doubts_of_system", "load_now"]

SYS = Path("/sys")
_LOAD_LIMIT = 0.25  # runnable others, a core
_LOAD_LOOKS, _LOAD_SECONDS = 40, 0.0257  # looks, and what lies between two of them: no whole number of the kernel's ticks
_OTHERS_LIMIT = 0.15  # processor time of others, a core
_SWAPPED = 64 << 20  # bytes: what sleeps there for good is nobody's business
_FULL = 0.05  # of a file system
_GIB = 2**30


def load_now(*, proc: Path = PROC) -> float:
    """How many others run, could run, or wait for a disk: the mean of a second.

    The system's own load average looks back for minutes, and would have a run doubted for the one before it.
    """
    seen = 0
    for look in range(_LOAD_LOOKS):
        if look:
            time.sleep(_LOAD_SECONDS)
        fields = dict(line.split()[:2] for line in (proc / "stat").read_text().splitlines() if line.startswith("procs_"))
        seen += max(int(fields.get("procs_running", 0)) - 1, 0) + int(fields.get("procs_blocked", 0))  # less who looks
    return seen / _LOAD_LOOKS


def doubts_before(machine: Machine, disk: Path, memory: int, space: int = 0) -> list[str]:
    """What is in the way of a run that needs so many bytes of memory, and of space in the directory `disk`. Takes a second."""
    doubts = []
    load = load_now()
    if load > _LOAD_LIMIT * machine.cores:
        doubts.append(f"load is {load:.1f} on {machine.cores} cores before the run")
    available = available_memory()
    if available < memory:
        doubts.append(
            f"{available / _GIB:.1f} GiB of memory are available, {memory / _GIB:.1f} are needed: "
            "figures from the page cache may come from the disk"
        )
    if machine.file_system in MEMORY_FILE_SYSTEMS:
        doubts.append(f"the scratch directory is on {machine.file_system}: nothing is written to a disk, and the files take memory")
    room = os.statvfs(disk)
    left = (room.f_bavail * room.f_frsize - space) / max(room.f_blocks * room.f_frsize, 1)
    if left < _FULL:
        doubts.append(
            f"the file system will be {100 - 100 * max(left, 0.0):.0f}% full: files come in pieces, and some disks slow down"
        )
    return doubts + doubts_of_system(machine.cores)


def doubts_of_system(cores: int, *, sys: Path = SYS, proc: Path = PROC) -> list[str]:
    """What of the system's own settings and state makes figures less than they could be, or change."""
    doubts = []
    governors = {_word(path) for path in sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")}
    if governors - {"performance", ""}:
        doubts.append(f"processor frequencies change: scaling governor {', '.join(sorted(governors - {''}))}")
    if any(_word(path) == "Discharging" for path in sys.glob("class/power_supply/*/status")):
        doubts.append("the machine runs on its battery, which may slow it down")
    if "[never]" in _word(sys / "kernel/mm/transparent_hugepage/enabled"):
        doubts.append("transparent huge pages are off: large reads reach the disk in more requests than they need")
    memory = meminfo(proc)
    swapped = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    if swapped > _SWAPPED:
        doubts.append(f"{swapped / _GIB:.1f} GiB are swapped out: memory is short, or was")
    allowed = allowance(proc)
    if allowed.memory_bytes is not None and allowed.memory_bytes < memory["MemTotal"]:
        doubts.append(
            f"the container may use {allowed.memory_bytes / _GIB:.1f} GiB of memory, page cache included, "
            f"of the machine's {memory['MemTotal'] / _GIB:.1f}"
        )
    if allowed.cores is not None and allowed.cores < cores:
        doubts.append(f"the container may use {allowed.cores:.2g} of {cores} cores: it is stopped for a while where it uses more")
    return doubts


def _word(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counters at one moment."""

    at: float
    busy: float
    stolen: float
    own: float
    swapped: int
    hot: int
    allowed: Allowance


class Usage:
    """What others on the machine used, and what slowed it down, while something ran. Made when it starts.

    The process's own time has that of its children which were waited for: end and wait for them before asking.
    """

    def __init__(self, *, sys: Path = SYS, proc: Path = PROC) -> None:
        self._sys, self._proc = sys, proc
        self._start = self._look()

    def _look(self) -> _Seen:
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal; interrupts and kernel threads count as others'
        user, nice, system, _, _, irq, softirq, steal = (
            int(n) / ticks for n in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        times = os.times()
        paging = dict(line.split() for line in (self._proc / "vmstat").read_text().splitlines())
        return _Seen(
            at=time.perf_counter(),
            busy=user + nice + system + irq + softirq,
            stolen=steal,
            own=times.user + times.system + times.children_user + times.children_system,
            swapped=int(paging.get("pswpin", 0)) + int(paging.get("pswpout", 0)),
            hot=sum(
                int(_word(path) or 0)
                for path in self._sys.glob("devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")
            ),
            allowed=allowance(self._proc),
        )

    def doubts(self, cores: int) -> list[str]:
        """What came in between, if it matters."""
        start, end = self._start, self._look()
        seconds = max(end.at - start.at, 0.1)
        others = (end.busy - start.busy - (end.own - start.own)) / seconds / cores
        stolen = (end.stolen - start.stolen) / seconds / cores
        doubts = []
        if others > _OTHERS_LIMIT:
            doubts.append(f"others used {100 * others:.0f}% of the processors during the run")
        if stolen > _OTHERS_LIMIT / 3:
            doubts.append(f"the hypervisor took {100 * stolen:.0f}% of the processors' time during the run")
        if end.hot > start.hot:
            doubts.append(f"processors were slowed down {end.hot - start.hot} times since they were too hot")
        if end.swapped > start.swapped:
            doubts.append(f"{end.swapped - start.swapped} pages were swapped during the run")
        stopped = (end.allowed.throttled or 0.0) - (start.allowed.throttled or 0.0)
        if stopped > seconds / 100:
            doubts.append(f"the container's quota of processor time stopped it for {stopped:.1f} s during the run")
        return doubts
