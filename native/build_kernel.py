"""Builds ``kvstore.kernel._native``; named by ``setup.py``, and not part of the package."""

import os
import re
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent if "__file__" in globals() else Path("native").resolve()
SOURCES = [
    "crc32c.c",
    "crc32c_portable.c",
    "crc32c_x86.c",
    "crc32c_pclmul.c",
    "crc32c_arm64.c",
    "copy.c",
    "pool.c",
    "map.c",
    "guard.c",
    "standin.c",
    "residency.c",
    "restore.c",
    "buffers.c",
    "chunks.c",
    "plan.c",
    "progress.c",
    "cuda.c",
    "headers.c",
    "writes.c",
    "heap.c",
]
HEADERS = ["kvs_kernel.h", "crc32c.h", "pool.h", "copy.h", "guard.h", "standin.h", "residency.h", "restore.h", "buffers.h"]


def declarations() -> str:
    """Return what the public header declares, without its preprocessor lines but for plain numbers."""
    text = re.sub(r"/\*.*?\*/", "", (NATIVE / "kvs_kernel.h").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.startswith("#") or re.fullmatch(r"#define \w+ \d+\s*", line))


# A user's newer compiler may warn of more than ours: only our own builds turn that into a failure.
STRICT = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("KVSTORE_WERROR") == "1" else []

ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "kvstore.kernel._native",
    '#include "kvs_kernel.h"\n',
    # setuptools wants paths relative to setup.py, which it runs beside.
    sources=[f"native/{name}" for name in SOURCES],
    depends=[f"native/{name}" for name in HEADERS],
    include_dirs=["native"],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", *STRICT],
    extra_link_args=["-pthread", "-ldl"],
)
