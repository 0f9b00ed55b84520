"""SGLang's `HiCacheFile`: a file a page. Its storage module is imported without a GPU, with a stand-in for triton."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benches.peers.driver import ChunkDriver
from benches.peers.shape import Bytes

__all__ = ["DRIVER"]


class _Plain:
    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class _Stub(types.ModuleType):
    """A module whose every attribute is there and does nothing: names that begin with a capital are classes, others modules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = "stand-in"
        self.__version__ = "3.6.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (_Plain,), {}) if name[:1].isupper() else _Stub(f"{self.__name__}.{name}")
        if isinstance(made, _Stub):
            made = sys.modules.setdefault(made.__name__, made)
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]  # as a decorator
        return lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        return


sys.meta_path.insert(0, _Finder())

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

logging.getLogger("sglang").setLevel(logging.ERROR)


class _HiCache(ChunkDriver):
    chunk_tokens: ClassVar[int] = 64

    def open(self, directory: Path, tokens: int) -> None:
        self.reserve(tokens)
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config={"file_storage_path": str(directory)},
        )
        self.cache: Any = HiCacheFile(config)

    def close(self) -> None:
        return

    def put(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> None:
        done = list(self.pool.map(lambda one: self.cache.set(one[0], torch.from_numpy(one[1])), zip(keys, buffers, strict=True)))
        if not all(done):
            raise OSError("HiCacheFile reports a set that failed")

    def count(self, keys: Sequence[str]) -> int:
        return int(self.cache.batch_exists(list(keys)))

    def get(self, keys: Sequence[str], buffers: Sequence[Bytes]) -> int:
        work = zip(keys, buffers, strict=True)
        found = list(self.pool.map(lambda one: self.cache.get(one[0], torch.from_numpy(one[1])), work))
        return next((i for i, one in enumerate(found) if one is None), len(found))


DRIVER = _HiCache
