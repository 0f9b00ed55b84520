"""Where a store may lie. LMDB's locks and memory maps are those of one kernel; a file system that another machine, a host or a
daemon has a hand in keeps neither coherent, and a store there is damaged in silence.
"""

from __future__ import annotations

import logging
import os

from kvstore.errors import CapError, SharingError

__all__ = ["check_file_system", "check_room", "file_system_of", "room_for", "warn_of_room"]

_log = logging.getLogger("kvstore")

_MOUNTS = "/proc/self/mountinfo"
_DESCRIPTOR = "/proc/self/fdinfo"

# Types as the kernel names them. What isn't here is taken for local; of FUSE only what is known to be.
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda",
    "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "davfs",
}  # fmt: skip
_CLUSTER = {"ocfs2", "gfs", "gfs2", "acfs"}
_SHARED_FOLDER = {"9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "drvfs", "wslfs", "fakeowner"}
_LOCAL_FUSE = {"fuseblk", "fuse.fuse-overlayfs"}


def check_file_system(directory: str, *, any_filesystem: bool) -> None:
    """Refuse a directory on a file system that LMDB must not be used on.

    An unknown FUSE file system is refused too: most are remote or object stores, and whether a daemon keeps maps and locks coherent
    can't be seen from outside. To be refused wrongly costs an argument; to be let in wrongly costs the store.

    Raises
    ------
    SharingError
        With the type and the reason.
    """
    found = None if any_filesystem else file_system_of(directory)
    why = None if found is None else _why_not(found)
    if why is not None:
        raise SharingError(
            f"{directory} is on a file system of type {found}, {why}; put the store on a local disk, or pass any_filesystem=True "
            "at your own risk if this one kernel is the only one that ever uses it"
        )


def _why_not(kind: str) -> str | None:
    if kind in _NETWORK:
        return "a network file system, on which LMDB's locks and memory map break"
    if kind in _CLUSTER:
        return "which other machines can mount too, and LMDB's locks and memory map hold on one machine only"
    if kind in _SHARED_FOLDER:
        return "a folder shared with another kernel, which LMDB's locks and memory map don't reach"
    if kind.startswith("fuse") and kind not in _LOCAL_FUSE:
        return "behind which a process decides what locks and memory maps do (most such file systems are remote)"
    return None


def file_system_of(directory: str) -> str | None:
    """The type of the file system that a directory is on; None where the system doesn't say.

    The kernel tells the mount of an open directory by its number, which mounts on top of others and bind mounts don't confuse.
    """
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with open(f"{_DESCRIPTOR}/{descriptor}", "rb") as file:
                numbers = [line.split()[1] for line in file if line.startswith(b"mnt_id:")]
        finally:
            os.close(descriptor)
        with open(_MOUNTS, "rb") as file:
            for line in file:
                fields = line.split()
                if fields[:1] == numbers[:1] and b"-" in fields[6:]:
                    return fields[fields.index(b"-", 6) + 1].decode()
    except (OSError, ValueError, IndexError):
        return None
    return None


def room_for(directory: str) -> int | None:
    """Bytes that this user can still write to a directory's file system; None where it doesn't say (a tmpfs without a size)."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return None
    return there.f_bavail * there.f_frsize if there.f_blocks else None


def check_room(directory: str, cap: int, taken: int) -> None:
    """Refuse a cap that the disk can't hold, before anything relies on it.

    Parameters
    ----------
    taken : int
        Bytes that the store takes on disk already.

    Raises
    ------
    CapError
        With both numbers.
    """
    room = room_for(directory)
    if room is not None and cap > room + taken:
        held = f" beside the {taken} that it takes" if taken else ""
        raise CapError(
            f"max_bytes is {cap}, the file system of {directory} has {room} bytes free for this store{held}: lower it or make room"
        )


def warn_of_room(directory: str, cap: int, taken: int) -> None:
    """Log that the disk has filled up under a store that exists: its saves will be refused before the cap is reached."""
    room = room_for(directory)
    if room is not None and cap > room + taken:
        _log.warning(
            "the store at %s has a cap of %d bytes and takes %d, its file system has %d free: saves may find the disk full "
            "before they evict; make room, or lower the cap with Store.resize (python -m kvstore resize)",
            directory, cap, taken, room,
        )  # fmt: skip
