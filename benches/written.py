"""What a process has written, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["written"]


def written(pid: int | str = "self") -> tuple[int, int]:
    """Bytes that a process has caused to be written to storage, and bytes that it has handed to write calls.

    The first are counted when pages of the cache become dirty. A durable save ends clean, so that what the next save changes
    again is counted again. The kernel keeps a file in pages of up to 2 MiB and counts one whole when a part of it becomes dirty,
    although it writes only that part: the count is exact only when the file was dropped from the cache before. The second
    number does not have that, and misses what is written through a map (LMDB is not used in that way here).
    """
    found = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    if "write_bytes" not in found:
        raise OSError("the kernel does not count this process's writes (CONFIG_TASK_IO_ACCOUNTING)")
    return int(found["write_bytes"]), int(found["wchar"])
