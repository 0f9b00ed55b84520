"""Gather and scatter against plain numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.kernel import Rows, crc32c_paths, force_crc32c, gather, payload_bytes, scatter

from .oracle import Payloads, Stream, expected_payload

DTYPES = [np.dtype(d) for d in ("u1", "u2", "f4", "i8", "c16", "V3", "V18", "V136")]


def memory(draw: st.DrawFn, shape: list[int]) -> NDArray[Any]:
    """Return a random array of some dtype whose axes are permuted, sliced and reversed in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -3])) for _ in shape]
    base_shape = [shape[i] * abs(steps[i]) for i in order]
    raw = np.random.default_rng(draw(st.integers(0, 99))).bytes(int(np.prod(base_shape)) * dtype.itemsize)
    base = np.frombuffer(bytearray(raw), dtype).reshape(base_shape)
    whole = base.transpose(np.argsort(order))
    return whole[tuple(slice(None, None, step) for step in steps)]


@st.composite
def strided(draw: st.DrawFn, tokens: int) -> Stream:
    """Draw a stream along any axis of an array with room for so many tokens."""
    per_row = draw(st.sampled_from([1, 1, 2, 4]))
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    axis = draw(st.integers(0, len(shape)))
    shape.insert(axis, tokens // per_row + draw(st.integers(0, 3)))
    return Stream(memory(draw, shape), axis, per_row)


@st.composite
def paged(draw: st.DrawFn, tokens: int) -> Stream:
    """Draw a stream in pages, its slots in runs or wholly shuffled."""
    per_row = draw(st.sampled_from([1, 1, 2]))
    page_rows = draw(st.integers(1, 9))
    pages = -(-tokens // per_row // page_rows) + draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    axis = draw(st.integers(0, len(shape)))
    shape[axis:axis] = [pages, page_rows]
    whole_pages = np.arange(pages * page_rows).reshape(pages, page_rows)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    random.shuffle(whole_pages)
    slots: NDArray[Any] = whole_pages.reshape(-1)
    if draw(st.booleans()):
        random.shuffle(slots)
    slots = slots[: tokens // per_row].astype(draw(st.sampled_from([np.int32, np.int64])))
    if draw(st.booleans()):
        slots.setflags(write=False)
    return Stream(memory(draw, shape), axis, per_row, slots)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Stream], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Draw streams and the blocks to copy: first, tokens, used."""
    block = draw(st.sampled_from([4, 16, 36]))
    blocks = draw(st.integers(1, 4))
    tail = draw(st.integers(0, block))
    capacity = (blocks + 1) * block
    streams = draw(st.lists(st.one_of(strided(capacity), paged(capacity)), min_size=1, max_size=4))
    tokens = np.full(blocks, block, np.int64)
    tokens[-1] = tail
    first = draw(st.sampled_from([0, block])) + np.arange(blocks, dtype=np.int64) * block
    used = np.array([draw(st.integers(0, int(t))) for t in tokens], np.int64)
    order = np.random.default_rng(blocks).permutation(blocks)
    return streams, first[order], tokens[order], used[order]


@settings(max_examples=250, deadline=None)
@given(
    jobs(),
    st.sampled_from(crc32c_paths()),
    st.sampled_from([0, 0, 1, 8, 63]),
    st.sampled_from([1, 3]),
)
def test_round_trip(job: Any, path: str, shift: int, threads: int) -> None:
    """Gather writes exactly the payloads that numpy makes, and scatter exactly the used rows, on every path."""
    streams, first, tokens, used = job
    force_crc32c(path)
    try:
        rows = [s.rows() for s in streams]
        payloads = Payloads(rows, tokens, shift)
        sums = gather(rows, payloads.addresses, first, tokens, threads=threads)
        payloads.check_guards()
        for i, view in enumerate(payloads.views):
            payload, expected = expected_payload(streams, int(first[i]), int(tokens[i]))
            assert view.tobytes() == payload
            assert sums[i].tolist() == expected

        before = [s.array.copy() for s in streams]
        for s in streams:
            s.array.view(np.dtype(("V", s.array.itemsize)))[...] = np.zeros((), ("V", s.array.itemsize))
        assert (scatter(rows, payloads.addresses, first, tokens, used, sums, threads=threads) == -1).all()
        for s, old in zip(streams, before, strict=True):
            restored = np.zeros_like(old)
            for i in range(first.size):
                index = s.index(int(first[i]), int(used[i]))
                restored[index] = old[index]
            assert s.array.tobytes() == restored.tobytes()
    finally:
        force_crc32c(None)


@pytest.mark.parametrize("path", crc32c_paths())
@pytest.mark.parametrize("blocks", [1, 2, 40])
def test_large(path: str, blocks: int) -> None:
    """Copies that are split between threads, or stream past the caches, are exact as well."""
    tokens = 1024
    random = np.random.default_rng(blocks)
    streams = [
        Stream(random.integers(0, 256, (blocks * tokens, 1031), np.uint8), 0),
        Stream(random.integers(0, 256, (3, blocks * tokens, 5, 10), np.uint8)[:, :, ::-1], 1),
        Stream(random.integers(0, 256, (8, blocks * tokens // 4, 256), np.uint8), 1, 4),
    ]
    force_crc32c(path)
    try:
        rows = [s.rows() for s in streams]
        first, count = np.arange(blocks) * tokens, np.full(blocks, tokens)
        payloads = Payloads(rows, count, shift=blocks % 2 * 16)
        sums = gather(rows, payloads.addresses, first, count, threads=4)
        payloads.check_guards()
        for i, view in enumerate(payloads.views):
            payload, expected = expected_payload(streams, int(first[i]), tokens)
            assert view.tobytes() == payload
            assert sums[i].tolist() == expected
        copies = [Stream(np.zeros_like(s.array), s.axis, s.tokens_per_row) for s in streams]
        used = count.copy()
        used[-1] = 700
        failed = scatter([s.rows() for s in copies], payloads.addresses, first, count, used, sums, threads=4)
        assert (failed == -1).all()
        for s, copy in zip(streams, copies, strict=True):
            filled = s.index(0, int(first[-1]) + 700)
            assert (copy.array[filled] == s.array[filled]).all()
            assert not copy.array[s.index(int(first[-1]) + 700, 324)].any()
    finally:
        force_crc32c(None)


@pytest.mark.parametrize("path", crc32c_paths())
@pytest.mark.parametrize("run", [255, 256, 257, 319, 1023, 1024, 1100, 2047, 2048, 5000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_runs_of_a_large_copy(path: str, run: int, shuffled: bool) -> None:
    """Runs around the lengths where a large copy changes its way are exact at any alignment, and nothing between is touched."""
    blocks, tokens = 2, (1 << 20) // run
    random = np.random.default_rng(run)
    streams: list[Stream] = []
    targets: list[Stream] = []
    for start in (0, 16, 37):
        memory = random.integers(0, 256, (tokens * blocks, start + run + 9), np.uint8)
        target = np.full_like(memory, 0xA5)
        slots = random.permutation(tokens * blocks) if shuffled else None
        for kind, array in ((streams, memory), (targets, target)):
            shaped = array.reshape(tokens, blocks, -1) if shuffled else array
            kind.append(Stream(shaped[..., start : start + run], 0, 1, slots))
    force_crc32c(path)
    try:
        rows = [s.rows() for s in streams]
        first, count = np.arange(blocks) * tokens, np.full(blocks, tokens)
        payloads = Payloads(rows, count, shift=run % 3)
        sums = gather(rows, payloads.addresses, first, count, threads=2)
        payloads.check_guards()
        for i, view in enumerate(payloads.views):
            payload, expected = expected_payload(streams, int(first[i]), tokens)
            assert view.tobytes() == payload
            assert sums[i].tolist() == expected
        assert (scatter([s.rows() for s in targets], payloads.addresses, first, count, count, sums, threads=2) == -1).all()
    finally:
        force_crc32c(None)
    for s, copied in zip(streams, targets, strict=True):
        assert (copied.array == s.array).all()
        whole = copied.array.base
        assert isinstance(whole, np.ndarray)
        around = whole.reshape(tokens * blocks, -1)
        width = around.shape[1]
        assert (around[:, width - 9 :] == 0xA5).all()
        assert (around[:, : width - 9 - run] == 0xA5).all()


def small_job(kinds: int = 3) -> tuple[list[Stream], list[Rows], Payloads, dict[str, Any]]:
    """Return four gathered blocks of 16 tokens, and the other arguments that scatter them."""
    streams = [Stream(np.random.default_rng(i).integers(0, 256, (64, 5 + i), np.uint8), 0) for i in range(kinds)]
    rows = [s.rows() for s in streams]
    first, tokens = np.arange(4) * 16, np.full(4, 16)
    payloads = Payloads(rows, tokens)
    sums = gather(rows, payloads.addresses, first, tokens)
    return streams, rows, payloads, {"first": first, "tokens": tokens, "used": tokens, "sums": sums}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), st.data(), st.integers(0, 7), st.sampled_from(crc32c_paths()))
def test_flipped_bit(block: int, data: st.DataObject, bit: int, path: str) -> None:
    """A flipped bit is found wherever it lies in a segment, used or not, and doesn't matter in the padding."""
    _, rows, payloads, args = small_job()
    args["used"] = np.array([0, 3, 15, 16])
    view = payloads.views[block]
    at = data.draw(st.integers(0, view.size - 1))
    view[at] ^= 1 << bit
    expected, offset = np.full(4, -1), 0
    for i, r in enumerate(rows):
        if offset <= at < offset + 16 * r.row_bytes:
            expected[block] = i
        offset += payload_bytes([r], 16)
    force_crc32c(path)
    try:
        assert scatter(rows, payloads.addresses, **args).tolist() == expected.tolist()
    finally:
        force_crc32c(None)


def test_the_first_bad_stream_is_named() -> None:
    """Of several damaged segments of a block the first one's index is returned, for each block by itself."""
    _, rows, payloads, args = small_job()
    args["sums"][1, 1:] ^= 1
    args["sums"][3, :] ^= 1
    assert scatter(rows, payloads.addresses, **args).tolist() == [-1, 1, -1, 0]


def test_skipped_streams() -> None:
    """A skipped stream takes its place in the payload and is neither copied, checked nor zeroed."""
    streams, rows, payloads, args = small_job()
    with_gap = [rows[0], Rows.skip(row_bytes=rows[1].row_bytes), rows[2]]
    for view in payloads.views:
        view[:] = 0x5A
    sums = gather(with_gap, payloads.addresses, args["first"], args["tokens"])
    assert (sums[:, 1] == 0).all()
    assert (sums[:, ::2] == args["sums"][:, ::2]).all()
    start = payload_bytes(rows[:1], 16)
    assert (payloads.views[0][start : start + payload_bytes(rows[1:2], 16)] == 0x5A).all()
    streams[0].array[:] = 0
    kept = streams[1].array.copy()
    args["sums"][:, 1] = 12345
    assert (scatter(with_gap, payloads.addresses, **args) == -1).all()
    assert streams[0].array.any()
    assert (streams[1].array == kept).all()
    assert (with_gap[1].rows, with_gap[1].skipped, with_gap[1].writable) == (0, True, True)


def test_zero_sizes() -> None:
    """No blocks, no streams or no tokens are jobs like others, with nothing to do."""
    _, rows, payloads, args = small_job()
    none = np.zeros(0, np.int64)
    nowhere = np.zeros(0, np.uint64)
    assert gather(rows, nowhere, none, none).shape == (0, 3)
    assert scatter(rows, nowhere, none, none, none, np.zeros((0, 3), np.uint32)).shape == (0,)
    assert gather([], payloads.addresses, args["first"], args["tokens"]).shape == (4, 0)
    zero = np.zeros(4, np.int64)
    assert not gather(rows, payloads.addresses, args["first"], zero).any()
    assert (scatter(rows, payloads.addresses, zero, zero, zero, np.zeros((4, 3), np.uint32)) == -1).all()


def test_layout_of_a_payload() -> None:
    """Segments start at multiples of 64 bytes, in order, and the payload ends at one."""
    rows = [Rows.skip(row_bytes=3), Rows.skip(row_bytes=64, tokens_per_row=4), Rows.skip(row_bytes=100)]
    assert payload_bytes(rows, 5) == 64 + 64 + 512
    assert payload_bytes(rows, 3) == 64 + 0 + 320
    assert payload_bytes(rows, 0) == payload_bytes([], 7) == 0
