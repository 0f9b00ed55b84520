"""What a container allows: the control groups of this process, of either version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROC", "Allowance", "allowance"]

PROC = Path("/proc")
_NONE = 1 << 60  # version 1 says "no limit" by a number about as large as there is


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the control groups allow and have given. None where nothing is limited or known.

    Attributes
    ----------
    memory_bytes : int or None
        The least limit of memory, page cache included, of the group and those above it.
    memory_left : int or None
        What is left of it, counting the page cache as free.
    cores : float or None
        Processors, by the quota of processor time.
    throttled : float or None
        Seconds for which the quota has stopped this group so far.
    """

    memory_bytes: int | None = None
    memory_left: int | None = None
    cores: float | None = None
    throttled: float | None = None


def _groups(proc: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The version and the directory of this process's group, then of those above it that can be seen."""
    own: dict[str, str] = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    for line in (proc / "self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2" and "" in own:
            version, path = 2, own[""]
        elif kind == "cgroup" and controller in options.split(",") and controller in own:
            version, path = 1, own[controller]
        else:
            continue
        root, at = fields.split()[3:5]
        top = Path(at)
        inside = path.removeprefix(root).strip("/") if path.startswith(root) else ""
        # in a container that shows only its own groups the path may be the host's
        group = top / inside if (top / inside).is_dir() else top
        while True:
            yield version, group
            if group == top:
                break
            group = group.parent


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        found = int(path.read_text())
        return found if found < _NONE else None
    return None


def _table(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}
    return {}


def _memory(version: int, group: Path) -> tuple[int, int] | None:
    """The limit of one group, and what is left of it."""
    names = {2: ("memory.max", "memory.current", "file"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")}
    limit_name, used_name, cache_name = names[version]
    limit = _number(group / limit_name)
    if limit is None:
        return None
    used = _number(group / used_name) or 0
    return limit, limit - used + min(_table(group / "memory.stat").get(cache_name, 0), used)


def _cores(version: int, group: Path) -> float | None:
    if version == 1:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return quota / period if quota and period and quota > 0 else None
    with contextlib.suppress(OSError, ValueError):
        words = (group / "cpu.max").read_text().split()
        return int(words[0]) / int(words[1])
    return None


def allowance(proc: Path = PROC) -> Allowance:
    """What this process may use, by the files under `proc`."""
    limits: list[tuple[int, int]] = []
    cores: list[float] = []
    throttled = None
    with contextlib.suppress(OSError, ValueError):
        for version, group in _groups(proc, "memory"):
            found = _memory(version, group)
            limits += [found] if found else []
        for place, (version, group) in enumerate(_groups(proc, "cpu")):
            quota = _cores(version, group)
            cores += [quota] if quota else []
            stat = _table(group / "cpu.stat") if place == 0 else {}
            if "throttled_usec" in stat:
                throttled = stat["throttled_usec"] / 1e6
            elif "throttled_time" in stat:
                throttled = stat["throttled_time"] / 1e9
    return Allowance(
        memory_bytes=min((limit for limit, _ in limits), default=None),
        memory_left=min((left for _, left in limits), default=None),
        cores=min(cores, default=None),
        throttled=throttled,
    )
