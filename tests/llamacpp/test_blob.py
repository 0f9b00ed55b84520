"""Blobs made by hand: what is learned from them, where the rows lie, and that nothing malformed passes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.adapters.llamacpp.errors import BlobError
from kvstore.adapters.llamacpp.frame import Cells, Frame
from kvstore.adapters.llamacpp.geometry import Geometry
from kvstore.adapters.llamacpp.learn import learn
from kvstore.ids import as_tokens

from .blobs import F16, Q8_0, Blob, blob

TOKENS = as_tokens(range(100, 116))
SECTIONS: list[dict[str, Any]] = [
    {},
    {"mrope": True},
    {"window": 2},
    {"hybrid": True},
    {"window": 3, "hybrid": True},
    {"mrope": True, "window": 2, "hybrid": True},
]
FORMS = [(3, False, F16), (3, True, F16), (4, False, F16), (4, True, F16), (3, False, Q8_0), (4, False, Q8_0)]


def frame_of(geometry: Geometry, cells: int) -> Frame:
    """Give the frame of an attention-only blob."""
    return Frame(geometry, Cells(cells, None, None))


def order_of(frame: Frame, made: Blob, start: int) -> list[int] | None:
    """Check a blob of sequence 1 that starts at a position; return the order in which to take its cells."""
    order = frame.check(made, 1, start + (frame.cells.rows or 0), at=0)["rows"]
    return None if order is None else order.tolist()


@pytest.mark.parametrize(("version", "transposed", "kind"), FORMS)
def test_both_versions_are_told_apart(version: int, transposed: bool, kind: int) -> None:
    """The version, the transposition, the rotation and every type and shape are learned from the blob alone."""
    made = blob(range(5), version=version, transposed=transposed, kind=kind)
    geometry = learn(made, 1)
    assert geometry.rows is not None
    assert (geometry.version, geometry.rows.transposed, geometry.mrope, geometry.partial) == (version, transposed, False, False)
    assert geometry.rows.rotation == ((64, 64) if version == 4 else (0, 0))
    assert [s.name for s in geometry.streams()] == ["k.0", "v.0", "k.1", "v.1"]
    assert {s.dtype for s in geometry.streams()} == {"f16" if kind == F16 else "q8_0"}
    assert [s.token_axis for s in geometry.streams()] == [0, int(transposed)] * 2
    assert all(s.row_shape == (32,) for s in geometry.streams())


@pytest.mark.parametrize(("version", "transposed", "kind"), FORMS)
def test_rows_are_where_the_format_has_them(version: int, transposed: bool, kind: int) -> None:
    """A frame written by the adapter, filled with the rows read from a blob, is that blob, byte for byte."""
    made = blob(range(6), version=version, transposed=transposed, kind=kind)
    frame = frame_of(learn(made, 1), 6)
    again = np.zeros(frame.nbytes, np.uint8)
    frame.write(again, 1, 6, TOKENS)
    source, target = frame.streams(made), frame.streams(again)
    for name, rows in source.items():
        target[name][...] = rows
    assert again.tobytes() == made.tobytes()
    assert order_of(frame, made, 0) is None


def test_layers_keep_their_order() -> None:
    """K of all layers come first in the blob and each stream finds its own rows."""
    made = blob(range(3), layers=3)
    rows = frame_of(learn(made, 1), 3).streams(made)
    rng = np.random.default_rng(7)
    for name in ("k.0", "k.1", "k.2", "v.0", "v.1", "v.2"):
        assert rows[name].tobytes() == rng.bytes(3 * 64), name


def test_cells_out_of_order_are_given_an_order() -> None:
    """Cells that lie in another order than their positions are accepted, with the order in which to take them."""
    made = blob([7, 5, 8, 6])
    assert order_of(frame_of(learn(made, 1), 4), made, 5) == [1, 3, 0, 2]


@pytest.mark.parametrize("positions", [[5, 6, 8], [5, 5, 6], [4, 5, 6], [6, 7, 8]])
def test_other_positions_are_refused(positions: list[int]) -> None:
    """A missing, doubled or foreign position is an error that names the range that was asked for."""
    made = blob(positions)
    with pytest.raises(BlobError, match=r"\[5, 8\)"):
        order_of(frame_of(learn(made, 1), 3), made, 5)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (blob(range(2), streams=2), "kv_unified"),
        (np.append(blob(range(2)), np.zeros(9, np.uint8)), "9 bytes follow that are neither"),
        (blob(range(2), kind=F16)[: -2 * (12 + 128)], "no V"),
        (blob([]), "no cells"),
        (blob(range(2), seq=3), "sequence 3"),
    ],
    ids=["two streams", "a second section", "no V", "no cells", "another sequence"],
)
def test_what_is_not_taken_is_named(made: Blob, says: str) -> None:
    """State of a kind that the adapter does not take is refused with what was found."""
    with pytest.raises(BlobError, match=says):
        learn(made, 1)


def whole(geometry: Geometry, cells: int, sections: dict[str, Any]) -> Frame:
    """Give the frame of a whole blob."""
    return Frame(geometry, Cells(cells, sections.get("window"), 1 if sections.get("hybrid") else None))


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize(("version", "transposed", "kind"), FORMS)
def test_sections_are_told_apart(version: int, transposed: bool, kind: int, sections: dict[str, Any]) -> None:
    """Windows, recurrent parts and M-RoPE are learned from the blob alone, and a blob of what was read is that blob."""
    made = blob(range(5), version=version, transposed=transposed, kind=kind, **sections)
    geometry = learn(made, 1, window_cells=3)
    assert geometry.version == version
    assert geometry.mrope == sections.get("mrope", False)
    assert (geometry.window is not None, geometry.recurrent is not None) == ("window" in sections, "hybrid" in sections)
    frame = whole(geometry, 5, sections)
    again = np.zeros(frame.nbytes, np.uint8)
    frame.write(again, 1, 5, as_tokens([9] * 5))
    for views in (Frame.streams, Frame.states):
        source, target = views(frame, made), views(frame, again)
        assert bool(source) == (views is Frame.streams or geometry.partial)
        for name, rows in source.items():
            target[name][...] = rows
    assert again.tobytes() == made.tobytes()
    assert frame.check(made, 1, 5, at=5) == {"rows": None, "window": None}


def test_two_sections_need_a_window() -> None:
    """A second section of cells in a model without a sliding window is state of a kind that is not known, and refused."""
    with pytest.raises(BlobError, match="no sliding window"):
        learn(blob(range(5), window=2), 1)


@pytest.mark.parametrize("field", [8, 12, 16])
def test_images_are_refused(field: int) -> None:
    """A cell whose M-RoPE positions are not its own, or that is of no token, is named."""
    made = blob(range(5), mrope=True)
    frame = whole(learn(made, 1), 5, {})
    made[16 + 24 + field : 16 + 24 + field + 4] = 0xFF
    with pytest.raises(BlobError, match="not of text"):
        frame.check(made, 1, 5, at=5)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMS), sections=st.sampled_from(SECTIONS))
def test_damaged_headers_raise_named_errors_only(
    data: st.DataObject, form: tuple[int, bool, int], sections: dict[str, Any]
) -> None:
    """Whatever byte of a blob is changed, and wherever it is cut, learning it gives a geometry or a BlobError."""
    version, transposed, kind = form
    made = blob(range(3), version=version, transposed=transposed, kind=kind, **sections)
    for _ in range(data.draw(st.integers(0, 3))):
        made[data.draw(st.integers(0, 80) | st.integers(0, made.size - 1))] = data.draw(st.integers(0, 255))
    made = made[: data.draw(st.just(made.size) | st.integers(0, made.size))]
    try:
        geometry = learn(made, 1, window_cells=3)
    except BlobError:
        return
    assert whole(geometry, 3, sections).nbytes == made.size


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), form=st.sampled_from(FORMS), sections=st.sampled_from(SECTIONS))
def test_every_header_byte_is_checked(at: int, bit: int, form: tuple[int, bool, int], sections: dict[str, Any]) -> None:
    """A blob with one flipped bit is refused, unless the bit lies in a row, a state or a token."""
    version, transposed, kind = form
    made = blob(range(3), version=version, transposed=transposed, kind=kind, **sections)
    frame = whole(learn(made, 1, window_cells=3), 3, sections)
    free = np.zeros(made.size, np.uint8)  # the bits that may be anything
    for rows in (*frame.streams(free).values(), *frame.states(free).values()):
        rows.view(np.uint8)[...] = 0xFF
    for section in (frame._rows, frame._window):
        if sections.get("mrope"):
            frame._table(free, section)["token"] = 0x7FFFFFFF
        elif section is frame._window:  # beside rows a window is whatever it still holds
            frame._table(free, section)["position"] = -1
    at %= made.size
    changed = made.copy()
    changed[at] ^= 1 << bit
    if free[at] >> bit & 1:
        assert frame.check(changed, 1, 3, at=3) == {"rows": None, "window": None}
    else:
        with pytest.raises(BlobError):
            frame.check(changed, 1, 3, at=3)


@pytest.mark.parametrize("size", [0, 15, -1, 1])
def test_a_blob_of_another_size_is_refused(size: int) -> None:
    """A blob that is not exactly as long as its cells need is refused before anything in it is looked at."""
    made = blob(range(2))
    frame = frame_of(learn(made, 1), 2)
    other = np.resize(made, size if size in (0, 15) else made.size + size)
    with pytest.raises(BlobError, match="bytes"):
        order_of(frame, other, 0)
