"""Every error that kvstore raises: one root, and each is also the builtin that fits.

A message says what came, what was expected, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ArrayError",
    "BaseLost",
    "BlockDamaged",
    "CapError",
    "DeviceError",
    "DiskError",
    "DriverMissingError",
    "EngineError",
    "ForkedStoreError",
    "FormatVersionError",
    "IndexDamaged",
    "KVStoreError",
    "LayoutError",
    "LeaseClosedError",
    "MappingError",
    "MissingPackageError",
    "NotAStoreError",
    "SharingError",
    "SpacePinned",
    "StagingBusyError",
    "StagingClosedError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreFullError",
    "StoreMissingError",
    "StoreOwnerError",
    "TokensError",
    "TokensTypeError",
    "TransferCancelled",
    "TransferTimeout",
    "ViewsAliveError",
    "WriteLockTimeout",
]


class KVStoreError(Exception):
    """The root of all errors of this package."""


class LayoutError(KVStoreError, ValueError):
    """A layout contradicts itself or holds what the format cannot express."""


class TokensError(KVStoreError, ValueError):
    """Tokens are not a 1-D, non-empty array of integers in [0, 2**32)."""


class TokensTypeError(TokensError, TypeError):
    """Tokens are not integers at all."""


class ArrayError(KVStoreError, ValueError):
    """An array's name, shape, dtype or token count does not fit the layout."""


class NotAStoreError(KVStoreError, OSError):
    """The path is a file, or a directory that holds something else."""


class StoreMissingError(KVStoreError, FileNotFoundError):
    """There is no store at the path and no cap was given to create one."""


class FormatVersionError(KVStoreError, ValueError):
    """The store was written by a version of the format that this code does not read."""


class StoreDamagedError(KVStoreError, OSError):
    """The file of the store is truncated or damaged; it was not opened."""


class StoreOwnerError(KVStoreError, PermissionError):
    """The store cannot be written, or its files belong to somebody else or are symbolic links."""


class SharingError(KVStoreError, OSError):
    """The store lies, or is in use, where LMDB's locks don't reach: a network file system, another kernel or PID namespace."""


class StoreBusyError(KVStoreError, TimeoutError):
    """Another process held the store exclusively for longer than the caller would wait."""


class StoreClosedError(KVStoreError, ValueError):
    """The store was used after `close()`."""


class ForkedStoreError(StoreClosedError):
    """What was made from a store before this process was forked is the parent's: the child opens the store for itself."""


class LeaseClosedError(KVStoreError, ValueError):
    """A lease was used after its `with` block or its `close()`."""


class ViewsAliveError(KVStoreError, BufferError):
    """A lease was closed explicitly while arrays made from it are still alive."""


class MappingError(KVStoreError, OSError):
    """The blocks of a lease can't be mapped side by side, or what was mapped can't be replaced by a copy."""


class CapError(KVStoreError, ValueError):
    """The cap is missing, too small for the store or the layout, or differs from the stored one."""


class StoreFullError(KVStoreError, OSError):
    """There is no room for a save, and evicting cannot make any."""


class DiskError(KVStoreError, OSError):
    """The operating system failed to write the store's file: the device fails, is gone, or is full without saying so."""


class SpacePinned(StoreFullError):
    """Freed pages are pinned by a reader that is still open, so evicting would gain nothing."""


class WriteLockTimeout(KVStoreError, TimeoutError):
    """Another writer held the store's write lock for longer than the time limit."""


class BaseLost(KVStoreError, LookupError):
    """The stored prefix that a save builds on was evicted, and the arrays given do not reach back to what is left."""


class BlockDamaged(KVStoreError, OSError):
    """A block's header or payload does not pass its checks; the block is refused from now on.

    Attributes
    ----------
    block_id : bytes
        The id of the damaged block, 32 bytes.
    position : int
        The first token position that the block holds, or the checkpoint's position for a block of states.
    offset : int or None
        Where its payload was looked for in the data file; None when the store doesn't know.
    """

    def __init__(self, message: str, *, block_id: bytes = b"", position: int = 0, offset: int | None = None) -> None:
        super().__init__(message)
        self.block_id = block_id
        self.position = position
        self.offset = offset


class MissingPackageError(KVStoreError, ImportError):
    """An optional package isn't installed, or is of a version that can't be used."""


class EngineError(KVStoreError, RuntimeError):
    """An engine broke its contract: it took a restored prefix without taking all of its streams and states."""


class IndexDamaged(KVStoreError, OSError):
    """A record of the index does not parse, fails its checksum, or is not the record that was asked for."""


class DeviceError(KVStoreError, RuntimeError):
    """A call of the CUDA driver failed.

    Attributes
    ----------
    call : str
        The driver's function.
    code : int
        Its error code; 0 where there is none.
    name : str
        The name of that code.
    """

    def __init__(self, message: str, *, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class DriverMissingError(DeviceError, OSError):
    """There is no CUDA driver on this machine, one that lacks a function, or one that has no device."""


class StagingBusyError(KVStoreError, TimeoutError):
    """All staging buffers of the budget were in use for longer than the caller would wait."""


class StagingClosedError(KVStoreError, ValueError):
    """Staging buffers were asked for after `close()`, or in a forked child."""


class TransferCancelled(KVStoreError, RuntimeError):
    """A transfer was cancelled before what is asked for was there."""


class TransferTimeout(KVStoreError, TimeoutError):
    """What a transfer was asked for did not come within the time limit; the transfer goes on."""
