"""Code as a user of the library writes it: the type checker has to accept it (tests/test_public.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import (
    Captured,
    DeviceArray,
    DeviceTransfer,
    Engine,
    KVStoreError,
    Layout,
    Match,
    Restored,
    SaveResult,
    SessionTier,
    Staging,
    State,
    StateHash,
    Store,
    Stream,
    Transfer,
    as_tokens,
    errors,
    image_tokens,
    state_hash,
)

LAYOUT = Layout(
    streams=(Stream("k", "f16", (8, 64)), Stream("v", "f16", (8, 64), token_axis=2)),
    states=(State("conv", "f32", (4, 16), bounded=(0,)), State.opaque("blob", 1 << 20)),
    model="a-model",
    identity={"revision": "abc", "layers": 32},
    shard=(0, 2),
)


class MyEngine:
    """An engine of somebody's."""

    def __init__(self) -> None:
        self.k = np.zeros(LAYOUT.streams[0].array_shape(4096), np.float16)
        self.v = np.zeros(LAYOUT.streams[1].array_shape(4096), np.float16)
        self.states: Mapping[str, npt.NDArray[Any]] = {}
        self.position = 0

    def layout(self) -> Layout:
        """Say what there is."""
        return LAYOUT

    def capture(self, start: int, stop: int) -> Captured:
        """Hand rows out."""
        return Captured({"k": self.k[start:stop], "v": self.v[:, :, start:stop]}, self.states)

    def apply(self, restored: Restored) -> None:
        """Take rows in."""
        restored.copy_into({"k": self.k, "v": self.v})
        self.states = restored.states()
        self.position = restored.length

    def reset(self) -> None:
        """Forget."""
        self.position = 0


def serve(path: Path, prompt: list[int]) -> int:
    """Answer a prompt."""
    engine: Engine = MyEngine()
    with Store.open(path, max_bytes=100 << 30) as store, SessionTier(store, engine, salt=b"tenant") as tier:
        reused: int = tier.promote(prompt)
        tier.cascade(prompt)
        return reused + tier.stats.reused_tokens


def by_hand(store: Store, tokens: npt.NDArray[np.int64]) -> float:
    """Save and restore without an engine."""
    namespace = store.namespace(LAYOUT)
    arrays = {"k": np.zeros((5, 8, 64), np.float16), "v": np.zeros((8, 64, 5), np.float16)}
    try:
        result: SaveResult = namespace.save(tokens, arrays, start=0, check=True)
    except errors.StoreFullError as full:
        raise KVStoreError(str(full)) from full
    match: Match | None = namespace.match(as_tokens([1, 2, 3]), limit=2)
    length = match.length if match is not None else 0
    with namespace.lease(image_tokens(b"0" * 32, 5)) as lease:
        if lease:
            lease.copy_into(arrays)
            lease.validate()
            first = lease.views("k")[0]
            length += int(first.shape[0]) + lease.blocks[0].payload.nbytes
    hashed: StateHash = state_hash(LAYOUT, arrays, 5)
    return result.seconds + length + len(hashed.differing(hashed)) + store.stats().blocks + len(store.verify(deep=True).problems)


def layer_by_layer(store: Store, tokens: list[int], arrays: dict[str, npt.NDArray[np.float16]], on_device: list[int]) -> int:
    """Restore with the first layers early, on the host and on a device."""
    with store.namespace(LAYOUT).lease(tokens) as lease, Staging(64 << 20, device=0) as staging:
        host: Transfer = lease.start_copy(arrays, threads=2)
        given = {"k": DeviceArray(on_device[0], (4096, 8, 64), 2)}
        device: DeviceTransfer = lease.to_device(given, staging=staging, ring=3)
        with host, device:
            for name in host.names:
                host.wait(name, timeout=1.0)
            device.wait("k", stream=on_device[1])
            return len(device.names) + staging.in_use
