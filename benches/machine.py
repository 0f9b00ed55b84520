"""The machine a run happens on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import blake3

import kvstore
from benches.cgroup import PROC, allowance

__all__ = ["MEMORY_FILE_SYSTEMS", "Machine", "available_memory", "commit", "file_system", "meminfo", "upstream"]

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures of a run depend on.

    Attributes
    ----------
    processor : str
    cores : int
        That this process may run on.
    memory_bytes : int
        Of the machine, or of the container where that is less.
    file_system, device : str
        Of the scratch directory.
    kernel : str
        Its upstream version.
    python : str
    packages : dict of str to str
        Versions of what the library stands on.
    source : str
        What the library's files hash to: a change of its code is another version, whatever its number says.
    commit : str
        The commit of the checkout that they are in, with a "+" behind it where files differ from it; empty where that can't be
        known.
    """

    processor: str
    cores: int
    memory_bytes: int
    file_system: str
    device: str
    kernel: str
    python: str
    packages: dict[str, str]
    source: str = ""
    commit: str = ""

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
            memory_bytes=min(meminfo()["MemTotal"], allowance().memory_bytes or sys.maxsize),
            file_system=kind,
            device=_device(scratch, source),
            kernel=upstream(platform.release()),
            python=platform.python_version(),
            packages=versions,
            source=_source(),
            commit=commit(Path(kvstore.__file__).parents[1]),
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
            f"code         {self.source}" + (f", commit {self.commit}" if self.commit else ""),
        ]


def upstream(release: str) -> str:
    """A kernel's upstream version, without what a vendor has put behind it: 6.1.102 of 6.1.102-vendor.3.

    The suffix names a build, of which there are many; figures of one machine are not to be kept apart by it.
    """
    found = re.match(r"\d+\.\d+(\.\d+)?(-rc\d+)?(?![\w])", release)
    return found[0] if found else release


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _source() -> str:
    """What the files of the library hash to, compiled ones among them."""
    top = Path(kvstore.__file__).parent
    digest = blake3.blake3()
    for path in sorted(path for path in top.rglob("*") if path.suffix in (".py", ".so")):
        digest.update(str(path.relative_to(top)).encode() + b"\0" + blake3.blake3(path.read_bytes()).digest())
    return str(digest.hexdigest(6))


def commit(top: Path) -> str:
    """The commit of a checkout, by git; nothing where there is no git, or the directory isn't the top of a checkout."""
    if not (top / ".git").exists():
        return ""
    try:
        asked = ["git", "-C", str(top), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """The system's account of its memory, in bytes (counts of huge pages are multiplied too: don't use them)."""
    found = {}
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found[key] = int(value.split()[0]) * 1024
    return found


def available_memory() -> int:
    """Bytes that can be had without swapping, by the kernel's estimate, and within a container's limit."""
    left = allowance().memory_left
    return meminfo()["MemAvailable"] if left is None else min(meminfo()["MemAvailable"], max(left, 0))


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
