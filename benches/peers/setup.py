"""`make bench-peers`: an environment of the peers' own, step by step, with the reason written down for each that can't be had.

Nothing needs root: libraries of Debian that a peer links to are unpacked beside. The standard library is all that this needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

__all__ = ["STEPS", "Step", "main"]


@dataclass(frozen=True, slots=True)
class Step:
    """Something to install.

    Attributes
    ----------
    package : str
        By which the registry of peers asks for it.
    alone : tuple of str
        Installed without dependencies: most of what these ask for is for a GPU and isn't needed here.
    plain : tuple of str
        Installed with dependencies.
    module : str
        That must be importable afterwards.
    debian : tuple of str
        Debian packages whose libraries are unpacked beside, where the system doesn't have them.
    library : str
        By which the system has them.
    variables : tuple of (str, str)
        Added to the environment.
    limit : float
        Seconds that it may take.
    """

    package: str
    module: str
    alone: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    library: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    limit: float = 900.0


_LMCACHE = (
    "aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi fsspec httptools httpx msgspec numba nvtx opentelemetry-sdk "
    "opentelemetry-exporter-otlp opentelemetry-exporter-prometheus prometheus_client psutil py-cpuinfo pyyaml pyzmq redis requests "
    "safetensors sortedcontainers transformers typing_extensions uvicorn"
)

STEPS = (
    Step("numpy", "numpy", plain=("numpy>=1.26",)),
    # exactly this one: its wheel is for processors, others bring gigabytes of CUDA
    Step("torch", "torch", plain=("torch==2.13.0",)),
    Step("safetensors", "benches.peers.drivers.safetensors_file", plain=("safetensors==0.8.0",)),
    Step("diskcache", "benches.peers.drivers.diskcache_driver", plain=("diskcache==5.6.3",)),
    Step("rocksdict", "benches.peers.drivers.rocks", plain=("rocksdict==0.3.29",)),
    Step("nixl-cu12", "benches.peers.drivers.nixl", alone=("nixl-cu12==1.5.1",)),
    Step("lmcache", "benches.peers.drivers.lmcache_l2", alone=("lmcache==0.5.6",), plain=tuple(_LMCACHE.split())),
    Step(
        "sglang",
        "benches.peers.drivers.sglang_file",
        alone=("sglang==0.5.23",),
        plain=("orjson", "pybase64", "pillow", "ipython", "aiohttp", "psutil", "pyzmq", "requests", "transformers", "fastapi"),
    ),
    Step(
        "mooncake-transfer-engine-non-cuda",
        "mooncake.store",
        alone=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
        debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
        library="libibverbs.so.1",
    ),
    Step(
        "llama-cpp-python",
        "llama_cpp",
        plain=("llama-cpp-python==0.3.36",),
        variables=(("CMAKE_ARGS", "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"),),
        limit=2400.0,  # it is compiled: 10 to 20 minutes on two idle cores
    ),
)


class _Failed(Exception):
    """A step did not work out; the message is the reason."""


def _run(command: Sequence[str], limit: float, variables: dict[str, str], cwd: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **variables}, timeout=limit, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"{Path(command[0]).name} took more than {limit:.0f} s") from None
    except OSError as error:
        raise _Failed(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        telling = [line for line in lines if line.startswith("ERROR:") or "Error" in line] or lines or ["no output"]
        raise _Failed(telling[-1].strip()[:300])


def _has_library(name: str) -> bool:
    tool = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        found = subprocess.run([tool, "-p"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return name in found.stdout


def _unpack(packages: Sequence[str], beside: Path) -> None:
    """Unpack the libraries of Debian packages, without installing them."""
    loads = beside / "packages"
    loads.mkdir(parents=True, exist_ok=True)
    for package in packages:
        try:
            _run(["apt-get", "download", package], 120, {}, loads)
        except _Failed as error:
            raise _Failed(
                f"needs {package} of Debian, which could not be downloaded ({error}); run apt-get update, or install it"
            ) from None
    for file in loads.glob("*.deb"):
        _run(["dpkg", "-x", str(file), str(beside)], 60, {}, loads)
    shutil.rmtree(loads)


def _install(step: Step, environment: Path) -> None:
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    variables = dict(step.variables)
    if step.alone:
        _run([*pip, "--no-deps", *step.alone], step.limit, variables, ROOT)
    if step.plain:
        _run([*pip, *step.plain], step.limit, variables, ROOT)
    beside = environment / "debian"
    if step.debian and not _has_library(step.library):
        _unpack(step.debian, beside)
    paths = sorted({str(path.parent) for path in beside.rglob("*.so*")})
    found = {"LD_LIBRARY_PATH": os.pathsep.join(paths)} if paths else {}
    _run([python, "-c", f"import {step.module}"], 300, {**found, "PYTHONPATH": str(ROOT)}, ROOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up what isn't yet; return 0 even when something can't be had, since the report then says so."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers.setup", description="Install what kvstore is compared with.")
    parser.add_argument("environment", type=Path, nargs="?", default=ROOT / ".venv-peers", help="where (default: .venv-peers)")
    parser.add_argument("--only", action="append", choices=[step.package for step in STEPS], help="install only this")
    options = parser.parse_args(arguments)
    environment: Path = options.environment.resolve()
    notes = environment / "peers.json"
    if not (environment / "bin" / "python").exists():
        try:
            _run([sys.executable, "-m", "venv", str(environment)], 300, {}, ROOT)
        except _Failed as error:
            print(f"benches.peers.setup: no environment in {environment}: {error}", file=sys.stderr)
            return 1
    try:
        _all(environment, notes, options.only)
    except KeyboardInterrupt:
        print("benches.peers.setup: interrupted; what is installed stays, run it again for the rest", file=sys.stderr)
        return 130
    return 0


def _all(environment: Path, notes: Path, only: Sequence[str] | None) -> None:
    found: dict[str, str] = json.loads(notes.read_text()) if notes.exists() else {}
    for step in STEPS:
        if found.get(step.package) == "" or (only and step.package not in only):
            continue
        print(f"== {step.package}", flush=True)
        start = time.monotonic()
        try:
            _install(step, environment)
            found[step.package] = ""
            print(f"   done in {time.monotonic() - start:.0f} s", flush=True)
        except _Failed as error:
            found[step.package] = str(error)
            print(f"   not to be had: {error}", flush=True)
        notes.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
