"""Destinations that are given again: described once, and checked again as soon as anything about them is another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.errors import ArrayError
from kvstore.testing import destination, session_rows
from tests.support import CAP, plain_layout, save

TOKENS = list(range(100))


def test_arrays_that_changed_are_checked_again(tmp_path: Path) -> None:
    """Arrays that come again take piece after piece; one in another's place gets the bytes, one that no longer fits is refused."""
    layout = plain_layout()
    rows = session_rows(layout, TOKENS)
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        save(namespace, TOKENS)
        with namespace.lease(TOKENS) as lease:
            into = destination(layout, 32)
            for start in (0, 32, 64):
                lease.copy_into(into, start=start, stop=start + 32)
                for stream in layout.streams:
                    expected = rows[stream.name].take(range(stream.rows(start), stream.rows(start + 32)), axis=stream.token_axis)
                    assert into[stream.name].tobytes() == expected.tobytes(), (stream.name, start)
            old, into["v"] = into["v"], np.zeros_like(into["v"])
            lease.copy_into(into, start=0, stop=32)
            assert np.array_equal(into["v"], rows["v"][:32])
            assert np.array_equal(old, rows["v"][64:96])
            with pytest.raises(ArrayError, match="for 48 tokens"):
                lease.copy_into(into, start=0, stop=48)
            with pytest.raises(ArrayError, match="no"):
                lease.copy_into({**into, "w": into["v"]}, start=0, stop=32)
            lease.copy_into(into, start=32, stop=64)
            into["v"].flags.writeable = False
            with pytest.raises(ArrayError, match="read-only"):
                lease.copy_into(into, start=0, stop=32)
            assert np.array_equal(into["v"], rows["v"][32:64])
