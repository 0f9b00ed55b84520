"""CRC32C: known answers, and each path against the portable one."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernel import crc32c, crc32c_paths, crc32c_with, force_crc32c

# RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
KNOWN = [
    (b"", 0),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
]
# Around every length at which one of the paths changes its way of working.
EDGES = sorted(
    {0, 1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097}
    | {n + d for n in (256, 768, 832, 1024, 1280, 1536, 6144, 6912, 12288, 20000) for d in (-1, 0, 1)}
)
DATA = np.random.default_rng(3720).integers(0, 256, 1 << 16, np.uint8)


@pytest.fixture(params=crc32c_paths())
def forced(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once on each path of this processor."""
    force_crc32c(request.param)
    yield request.param
    force_crc32c(None)


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_answers(forced: str, data: bytes, expected: int) -> None:
    """Every path gives the published checksums."""
    assert crc32c(data) == crc32c_with(forced, data) == expected


@pytest.mark.parametrize("path", crc32c_paths())
def test_edges(path: str) -> None:
    """Every path agrees with the portable one around the lengths where it changes gear, at every alignment."""
    for length in EDGES:
        for start in (0, 1, 7, 8, 33, 63):
            data = DATA[start : start + length]
            assert crc32c_with(path, data, 0xDEADBEEF) == crc32c_with("portable", data, 0xDEADBEEF), (length, start)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1 << 15), st.integers(0, 2**32 - 1))
def test_random_ranges(start: int, length: int, seed: int) -> None:
    """All paths agree on any range and seed."""
    data = DATA[start : start + length]
    assert len({crc32c_with(path, data, seed) for path in crc32c_paths()}) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=6))
def test_chained(cuts: list[int]) -> None:
    """Continuing from a seed piece by piece gives the checksum of the whole."""
    whole = DATA[: sum(cuts)]
    for path in crc32c_paths():
        at = seed = 0
        for cut in cuts:
            seed = crc32c_with(path, whole[at : at + cut], seed)
            at += cut
        assert seed == crc32c(whole)


def test_kinds_of_buffer() -> None:
    """Anything contiguous with the buffer protocol is taken, and nothing else."""
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    expected = crc32c(array.tobytes())
    assert crc32c(array) == crc32c(memoryview(array.tobytes())) == crc32c(bytearray(array.tobytes())) == expected
    with pytest.raises((ValueError, BufferError)):
        crc32c(array[:, ::2])
    with pytest.raises(TypeError):
        crc32c("text")  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    """A seed that is no checksum and a path that isn't there are refused by name."""
    with pytest.raises(OverflowError):
        crc32c(b"x", 1 << 32)
    with pytest.raises(OverflowError):
        crc32c(b"x", -1)
    with pytest.raises(ValueError, match="abacus"):
        crc32c_with("abacus", b"x")
    with pytest.raises(ValueError, match="abacus"):
        force_crc32c("abacus")


def test_the_oracle_is_always_there() -> None:
    """The portable path is the last of the list on every machine."""
    assert crc32c_paths()[-1] == "portable"
