"""The machine a run happens on, and what makes its figures untrustworthy."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["MEMORY_FILE_SYSTEMS", "Machine", "Usage", "available_memory", "doubts_before", "file_system"]

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_LOAD_LIMIT = 0.25  # runnable others, a core
_OTHERS_LIMIT = 0.15  # processor time of others, a core


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures of a run depend on.

    Attributes
    ----------
    processor : str
    cores : int
        That this process may run on.
    memory_bytes : int
    file_system, device : str
        Of the scratch directory.
    kernel, python : str
    packages : dict of str to str
        Versions of what the library stands on.
    """

    processor: str
    cores: int
    memory_bytes: int
    file_system: str
    device: str
    kernel: str
    python: str
    packages: dict[str, str]

    @classmethod
    def look(cls, scratch: Path) -> Machine:
        """Describe this machine as seen from a directory."""
        kind, source = file_system(scratch)
        versions = {}
        for package in ("kvstore", "numpy", "lmdb", "blake3"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=_meminfo()["MemTotal"],
            file_system=kind,
            device=_device(scratch, source),
            kernel=platform.release(),
            python=platform.python_version(),
            packages=versions,
        )

    def record(self) -> dict[str, Any]:
        """As it goes into the JSON file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As a person reads it."""
        return [
            f"processor    {self.processor}, {self.cores} cores",
            f"memory       {self.memory_bytes / 2**30:.1f} GiB, {available_memory() / 2**30:.1f} GiB available",
            f"file system  {self.file_system} on {self.device}",
            f"kernel       {self.kernel}; Python {self.python}; {', '.join(f'{k} {v}' for k, v in self.packages.items())}",
        ]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _meminfo() -> dict[str, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found[key] = int(value.split()[0]) * 1024
    return found


def available_memory() -> int:
    """Bytes that can be had without swapping, by the kernel's estimate."""
    return _meminfo()["MemAvailable"]


def file_system(path: Path) -> tuple[str, str]:
    """Type and source of the file system that holds a directory."""
    number = path.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    found = ("unknown", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                kind, source, *_ = rest.split()
                found = (kind, source)
    return found


def _device(path: Path, source: str) -> str:
    number = path.stat().st_dev
    at = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not at.exists():
        return source
    name = at.resolve().name
    disk = at.resolve().parent if (at / "partition").exists() else at.resolve()
    with contextlib.suppress(OSError):
        model = (disk / "device" / "model").read_text().strip()
        return f"{name} ({model})" if model else name
    return name


def doubts_before(machine: Machine, disk: Path, memory: int) -> list[str]:
    """What makes the figures of a run that needs so much memory untrustworthy, seen before it starts."""
    doubts = []
    load = os.getloadavg()[0]
    if load > _LOAD_LIMIT * machine.cores:
        doubts.append(f"load is {load:.1f} on {machine.cores} cores before the run")
    if available_memory() < memory:
        doubts.append(
            f"{available_memory() / 2**30:.1f} GiB of memory are available, {memory / 2**30:.1f} are needed: "
            "figures from the page cache may come from the disk"
        )
    if machine.file_system in MEMORY_FILE_SYSTEMS:
        doubts.append(f"{disk} is on {machine.file_system}: nothing is written to a disk, and the files take memory")
    governors = set()
    for governor in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with contextlib.suppress(OSError):
            governors.add(governor.read_text().strip())
    if governors - {"performance"}:
        doubts.append(f"processor frequencies change: scaling governor {', '.join(sorted(governors))}")
    return doubts


class Usage:
    """What others on the machine used while something ran. Made when it starts."""

    def __init__(self) -> None:
        self._busy, self._stolen = self._machine()
        self._own = self._process()
        self._start = time.perf_counter()

    @staticmethod
    def _machine() -> tuple[float, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal; interrupts and kernel threads count as others'
        user, nice, system, _, _, irq, softirq, steal = (
            int(n) / ticks for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        return user + nice + system + irq + softirq, steal

    @staticmethod
    def _process() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def doubts(self, cores: int) -> list[str]:
        """What came in between, if it matters."""
        seconds = max(time.perf_counter() - self._start, 0.1)
        busy, stolen = self._machine()
        others = (busy - self._busy - (self._process() - self._own)) / seconds / cores
        stolen = (stolen - self._stolen) / seconds / cores
        doubts = []
        if others > _OTHERS_LIMIT:
            doubts.append(f"others used {100 * others:.0f}% of the processors during the run")
        if stolen > _OTHERS_LIMIT / 3:
            doubts.append(f"the hypervisor took {100 * stolen:.0f}% of the processors' time during the run")
        return doubts
