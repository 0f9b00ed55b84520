"""Memory that LMDB frees at each commit and takes again for the next."""

from __future__ import annotations

from pathlib import Path

from tests.support import run_child


def test_freed_memory_is_kept(tmp_path: Path) -> None:
    """After a first large value the C library takes blocks of many MiB from its heap, not from the system, and keeps them when they
    are freed: each page of LMDB's copies would be a fault at every save otherwise.
    """
    code = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    class Info(ctypes.Structure):
        _fields_ = [(f"number{place}", ctypes.c_size_t) for place in range(10)]
    libc.mallinfo2.restype = Info
    def look():
        info = libc.mallinfo2()
        return info.number3, info.number0  # blocks that are maps of their own; bytes of the heap
    with Store.open(path, max_bytes=CAP) as store:
        save(store.namespace(wide_layout()), list(range(64)))
    maps, _ = look()
    block = libc.malloc(30 << 20)
    now, before = look()
    libc.free(block)
    print(now - maps, before - look()[1])
    """
    assert run_child(code, tmp_path / "s") == "0 0"
