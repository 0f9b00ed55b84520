"""What arrives on a device is what was saved, in every arrangement, form and cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import DeviceArray, Layout, Namespace, Staging, Store, Stream
from kvstore.testing import session_rows
from tests.device.arrays import FORMS, DeviceMemory, in_form
from tests.device.fake import FILL, PAGEABLE, PITCHED, PLAIN, Fake
from tests.support import examples, plain_layout, save

TOKENS = list(range(1000))


def deep_layout(block_tokens: int = 16) -> Layout:
    """Streams with several axes before the token axis, one of them strided in time."""
    streams = [
        Stream("m", "f32", (2, 3, 4), 2),
        Stream("q", "q8_0", (2, 64), 1),
        Stream("p", "bf16", (2, 2, 2, 3), 3, 8),
        Stream("s", "i8", (3,), 1, 4),
    ]
    return Layout(streams=tuple(streams), block_tokens=block_tokens, model="deep")


def assert_restored(memory: DeviceMemory, stream: Stream, length: int, tokens: list[int], layout: Layout) -> None:
    """Require the rows, and that nothing else of the memory was written."""
    rows = stream.rows(length)
    expected = session_rows(layout, tokens[:length])[stream.name]
    part = (slice(None),) * stream.token_axis + (slice(0, rows),)
    assert memory.array[part].tobytes() == expected.tobytes(), stream.name
    memory.array[part] = np.frombuffer(bytes([FILL] * memory.itemsize), memory.array.dtype)[0]
    assert (memory.memory.bytes == FILL).all(), f"{stream.name}: bytes beside the rows were written"


def to_device(namespace: Namespace, tokens: list[int], destinations: dict[str, Any], staging: Staging, **options: Any) -> int:
    """Restore and return the length."""
    with namespace.lease(tokens) as lease, lease.to_device(destinations, staging=staging, **options) as transfer:
        for name in transfer.names:
            transfer.wait(name)
        return lease.length


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [plain_layout, deep_layout])
def test_every_form(fake: Fake, store: Store, form: str, make: Any) -> None:
    """Rows arrive bit for bit through a pointer, the array interface and both kinds of DLPack; nothing beside them is written."""
    layout = make()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    memories = {s.name: DeviceMemory(fake, s, s.rows(1000) + 7) for s in layout.streams}
    given_arrays = {name: in_form(memory, form) for name, memory in memories.items()}
    with Staging(1 << 20, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        assert to_device(namespace, TOKENS[:997], given_arrays, staging) == 997
        for stream in layout.streams:
            assert_restored(memories[stream.name], stream, 997, TOKENS, layout)
        assert staging.in_use == 0
    assert fake.asked(PAGEABLE) == 0
    if form in ("legacy", "versioned"):
        for array in given_arrays.values():
            assert [capsule.given_back for capsule in array.capsules] == [1]
            assert array.capsules[0].name.startswith(b"used_dltensor")
            assert array.streams[0] > 2


def test_one_copy_a_chunk(fake: Fake, store: Store) -> None:
    """A chunk is one plain copy where tokens come first, one pitched copy where heads do, and one for each outer place beyond."""
    layout = deep_layout()
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    with Staging(1 << 20, chunk_bytes=1 << 18, device=0, driver=fake.path) as staging:
        for name, plain, pitched in (("m", 0, 1), ("q", 0, 1), ("p", 0, 1)):
            before = fake.asked(PLAIN), fake.asked(PITCHED)
            stream = next(s for s in layout.streams if s.name == name)
            to_device(namespace, TOKENS, {name: in_form(DeviceMemory(fake, stream, stream.rows(1000) + 1), "raw")}, staging)
            assert (fake.asked(PLAIN) - before[0], fake.asked(PITCHED) - before[1]) == (plain, pitched), name
        memory = DeviceMemory(fake, layout.streams[0], 1000)  # without room to spare all is one run
        before = fake.asked(PLAIN), fake.asked(PITCHED)
        to_device(namespace, TOKENS, {"m": in_form(memory, "raw")}, staging)
        assert (fake.asked(PLAIN) - before[0], fake.asked(PITCHED) - before[1]) == (1, 0)
        padded = DeviceMemory(fake, layout.streams[0], 1000, padding=(0, 1, 1, 0))
        before = fake.asked(PLAIN), fake.asked(PITCHED)
        to_device(namespace, TOKENS, {"m": in_form(padded, "raw")}, staging)
        assert (fake.asked(PLAIN) - before[0], fake.asked(PITCHED) - before[1]) == (0, 2)
        assert_restored(padded, layout.streams[0], 1000, TOKENS, layout)
    plain_stream = plain_layout().streams[1]
    tokens_first = store.namespace(plain_layout())
    save(tokens_first, TOKENS)
    with Staging(1 << 20, chunk_bytes=1 << 18, device=0, driver=fake.path) as staging:
        before = fake.asked(PLAIN), fake.asked(PITCHED)
        to_device(tokens_first, TOKENS, {"v": in_form(DeviceMemory(fake, plain_stream, 2000), "raw")}, staging)
        assert (fake.asked(PLAIN) - before[0], fake.asked(PITCHED) - before[1]) == (1, 0)


def test_interleaved_streams(fake: Fake, store: Store) -> None:
    """Two streams that lie row by row between each other in one array, as keys and values may, both arrive."""
    layout = Layout(streams=(Stream("k", "f16", (2, 4)), Stream("v", "f16", (2, 4))), block_tokens=16, model="kv")
    namespace = store.namespace(layout)
    save(namespace, TOKENS)
    both = Stream("kv", "f16", (2, 2, 4))
    memory = DeviceMemory(fake, both, 1000)
    parts = {name: memory.array[:, index] for index, name in enumerate(("k", "v"))}
    given_arrays = {
        name: DeviceArray(part.__array_interface__["data"][0], part.shape, 2, part.strides) for name, part in parts.items()
    }
    with Staging(1 << 20, chunk_bytes=4096, device=0, driver=fake.path) as staging:
        to_device(namespace, TOKENS, given_arrays, staging)
    rows = session_rows(layout, TOKENS)
    for name, part in parts.items():
        assert part.tobytes() == rows[name].tobytes()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A layout of one stream among others, an arrangement of its memory, and how it is cut."""
    axes = draw(st.integers(0, 3))
    row_shape = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    axis = draw(st.integers(0, axes))
    stream = Stream("x", draw(st.sampled_from(["u8", "f16", "f32", "f64"])), row_shape, axis, draw(st.sampled_from([1, 1, 2, 8])))
    # what lies behind the token axis stays together; the axes up to it lie in any order, with any room between
    order = [*draw(st.permutations(range(axis + 1))), *range(axis + 1, axes + 1)]
    padding = [draw(st.integers(0, 3)) for _ in range(axis + 1)] + [0] * (axes - axis)
    block_tokens = draw(st.sampled_from([8, 16, 64]))
    return {
        "layout": Layout(streams=(Stream("a", "f16", (3,)), stream), block_tokens=block_tokens, model="x"),
        "order": order,
        "padding": padding,
        "length": draw(st.integers(1, 300)),
        "spare": draw(st.integers(0, 9)),
        # a buffer holds at least a block's rows
        "chunk": draw(st.integers(1, 3)) * max(4096, stream.rows(block_tokens) * stream.row_bytes),
        "ring": draw(st.integers(1, 3)),
        "form": draw(st.sampled_from(FORMS)),
        "late": draw(st.booleans()),
    }


@settings(max_examples=examples(60))
@given(case=cases())
def test_any_arrangement(built: Fake, tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
    """Whatever the order of axes, the room between them, the tail, the chunks and the ring: the rows arrive and nothing else."""
    built.reset()
    layout = case["layout"]
    stream = layout.streams[1]
    tokens = TOKENS[: case["length"] + 5]
    if case["late"]:
        built.run_late()
    with Store.open(tmp_path_factory.mktemp("s") / "s", max_bytes=16 << 20) as store:
        namespace = store.namespace(layout)
        save(namespace, tokens)
        rows = stream.rows(case["length"]) + case["spare"]
        memory = DeviceMemory(built, stream, rows, order=case["order"], padding=case["padding"])
        with Staging(1 << 18, chunk_bytes=case["chunk"], device=0, driver=built.path) as staging:
            wanted = {"x": in_form(memory, case["form"])}
            assert to_device(namespace, tokens[: case["length"]], wanted, staging, ring=case["ring"]) == case["length"]
        assert_restored(memory, stream, case["length"], tokens, layout)
    built.assert_clean()
