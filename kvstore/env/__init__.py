"""The one package that imports lmdb: store files, their transactions, and everything that can be wrong with them."""

from kvstore.env.environment import Environment
from kvstore.env.opening import MIN_CAP, map_bytes_for, open_environment
from kvstore.env.place import check_room
from kvstore.env.processes import Process, is_running, this_process
from kvstore.env.registry import acquire_environment, exclusive_environment, exclusive_files
from kvstore.env.resizing import check_beside, compact, raise_cap
from kvstore.env.transactions import Databases, MapFull, Reader, Writer
from kvstore.env.verifying import verify_file

__all__ = [
    "MIN_CAP",
    "Databases",
    "Environment",
    "MapFull",
    "Process",
    "Reader",
    "Writer",
    "acquire_environment",
    "check_beside",
    "check_room",
    "compact",
    "exclusive_environment",
    "exclusive_files",
    "is_running",
    "map_bytes_for",
    "open_environment",
    "raise_cap",
    "this_process",
    "verify_file",
]
