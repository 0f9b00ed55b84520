"""bf16 and the 8-bit floats as numbers, by way of ml_dtypes, which is an optional dependency."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvstore import DTYPES, Layout, State, Store, Stream
from kvstore.errors import LayoutError, MissingPackageError
from kvstore.layout import typed
from tests.support import CAP

TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("label", sorted(TYPES))
def test_numbers_go_in_and_come_out(tmp_path: Path, label: str) -> None:
    """Arrays of ml_dtypes' types are saved as they are, restored into arrays of them, and viewed as the same numbers."""
    dtype = np.dtype(TYPES[label])
    layout = Layout((Stream("k", label, (2, 4), 1),), (State("s", label, (5,)),), block_tokens=16)
    rows = np.arange(1, 1 + 2 * 20 * 4).astype(np.float32).reshape(2, 20, 4).astype(dtype)
    state = np.array([0.5, 1, 2, 4, 8], np.float32).astype(dtype)
    tokens = list(range(20))
    with Store.open(tmp_path / "s", max_bytes=CAP) as store:
        namespace = store.namespace(layout)
        namespace.save(tokens, {"k": rows}, states={"s": state})
        into = np.zeros((2, 20, 4), dtype)
        with namespace.lease(tokens) as lease:
            lease.copy_into({"k": into})
            restored = lease.states()["s"]
            first = typed(lease.views("k")[0], label)
            assert first.dtype == dtype
            assert first.tobytes() == rows[:, :16].tobytes()
            assert not first.flags.owndata
            del first
    assert into.tobytes() == rows.tobytes()
    assert typed(restored, label).astype(np.float32).tolist() == state.astype(np.float32).tolist()
    assert typed(into, label) is into


@pytest.mark.parametrize("label", sorted(set(DTYPES) - set(TYPES)))
def test_other_labels_stay_as_they_are(label: str) -> None:
    """What numpy has itself, and what is packed, comes back as it is."""
    array = np.zeros(4, DTYPES[label].view)
    assert typed(array, label) is array


def test_another_type_is_refused() -> None:
    """Bytes of one label are not looked at as numbers of another size, nor of another 8-bit float."""
    with pytest.raises(LayoutError, match="uint16, got uint8"):
        typed(np.zeros(4, np.uint8), "bf16")
    with pytest.raises(LayoutError, match="got float8_e5m2"):
        typed(np.zeros(4, ml_dtypes.float8_e5m2), "f8_e4m3")


def test_without_the_package() -> None:
    """Where ml_dtypes isn't installed kvstore works, and asking for its types says what to install."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np\n"
        "from kvstore.layout import typed\n"
        "from kvstore.errors import MissingPackageError\n"
        "typed(np.zeros(3, '<f2'), 'f16')\n"
        "try:\n    typed(np.zeros(3, '<u2'), 'bf16')\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvstore[ml_dtypes]" in done.stdout
    assert issubclass(MissingPackageError, ImportError)
