"""Read-only maps of files."""

import os

from kvstore.kernel._native import ffi, lib

__all__ = ["FileMap"]


class FileMap:
    """A read-only, shared map of the first bytes of a file.

    It may be longer than the file: what the file grows by later appears in it. It outlives the descriptor. Reading
    behind the file's end, or a page that the disk can't deliver, kills the process with SIGBUS, so `populate` a range
    before it is read. Threads may share a map; who closes it vouches that nobody reads it any more.

    Parameters
    ----------
    fd : int
        Descriptor of a file open for reading. Stays the caller's, and may be closed at once.
    length : int
        Bytes to map, at least 1. Costs address space, not memory.

    Attributes
    ----------
    address : int
        Where the first byte lies; 0 once the map is closed.
    length : int
        Bytes mapped; 0 once the map is closed.

    Raises
    ------
    ValueError
        `length` isn't in [1, 2**47).
    OSError
        The file can't be mapped.
    """

    __slots__ = ("address", "length")

    address: int
    length: int

    def __init__(self, fd: int, length: int) -> None:
        self.address = self.length = 0
        if not 0 < length < 1 << 47:
            raise ValueError(f"length of a map must be at least 1 and below 2**47, not {length}")
        address = ffi.new("uint64_t *")
        if error := lib.kvs_map_open(fd, length, address):
            raise OSError(error, f"cannot map {length} bytes: {os.strerror(error)}")
        self.address = address[0]
        self.length = length

    def populate(self, offset: int, length: int) -> None:
        """Bring a range into memory, so that reading it afterwards raises no signal.

        The promise ends when memory gets short and the system drops pages, or when the file is truncated; a page that
        was read once is rarely the one that fails then.

        Parameters
        ----------
        offset, length : int
            Bytes, within the map.

        Raises
        ------
        ValueError
            The range isn't within the map, or the map is closed.
        OSError
            The range can't be read: EFAULT behind the end of the file or on a bad sector, EHWPOISON for broken memory.
        """
        if not self.address:
            raise ValueError("this map is closed")
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"[{offset}, {offset + length}) isn't within the map's {self.length} bytes")
        if error := lib.kvs_map_populate(self.address + offset, length):
            raise OSError(error, f"cannot read [{offset}, {offset + length}) of the map: {os.strerror(error)}")

    def discard(self, offset: int, length: int) -> None:
        """Unmap what of a range is mapped in, so that the page cache may drop it; the next access brings it back.

        Does nothing on a closed map. Reading the range meanwhile is safe.

        Parameters
        ----------
        offset, length : int
            Bytes; what lies outside the map is ignored.
        """
        end = min(offset + length, self.length)
        if self.address and 0 <= offset < end:
            lib.kvs_map_discard(self.address + offset, end - offset)

    def close(self) -> None:
        """End the map; its addresses are invalid from here. A second call does nothing."""
        address, length = self.address, self.length
        self.address = self.length = 0
        if address:
            lib.kvs_map_close(address, length)

    def __del__(self) -> None:
        self.close()
