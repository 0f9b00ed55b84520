"""Bit-exactness: a session that is taken up in another process goes on as if nothing had happened."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import Store
from tests.support import run_child

from .journeys import END, LENGTHS, uninterrupted
from .models import CONFIGS, DTYPES, engine, tokens

CASES = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
RESUME = """
import json
from tests.transformers.journeys import resumed
with Store.open(path) as store:
    print(json.dumps({case: resumed(store, *case.split()) for case in json.loads(sys.argv[2])}))
"""


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Let this process read every session to its end, and another one take each of them up at every length."""
    path = tmp_path_factory.mktemp("journeys") / "s"
    with Store.open(path, max_bytes=256 << 20) as store:
        whole = {f"{name} {dtype}": uninterrupted(store, name, dtype) for name, dtype in CASES}
    again = json.loads(run_child(RESUME, path, json.dumps(list(whole)), timeout=600))
    return {case: (whole[case], again[case]) for case in whole}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_session_goes_on_in_another_process(journeys: dict[str, tuple[Any, Any]], name: str, dtype: str) -> None:
    """Restored at any of the hard lengths, every row and state, the next logits and 64 greedy tokens are those of a run that
    was never interrupted, bit for bit."""
    whole, again = journeys[f"{name} {dtype}"]
    for length in LENGTHS:
        found = again[str(length)]
        assert found["reused"] == length
        assert found["stood"] == whole["stood"][str(length)], length
        assert found["logits"] == whole["logits"], length
        assert found["end"] == whole["end"], length
        assert len(found["tokens"]) == 64
        assert found["tokens"] == whole["tokens"], length
        assert found["last"] == whole["last"], length
    assert len(set(whole["tokens"])) > 3, "an answer of one token over and over would show nothing"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_reads_on_where_it_stopped(name: str) -> None:
    """A prompt that is read in pieces gives the logits of one that is read at once, but for rounding.

    That is Transformers' part, and what restoring builds on: versions before 5.18 forget states where more than one token is read.
    """
    prompt = tokens(END, 5)
    whole = engine(name).feed(prompt)
    for lengths in ((20,), (1, 3), (17, 19, 46)):
        running = engine(name)
        for start, stop in zip((0, *lengths), (*lengths, END), strict=True):
            logits = running.feed(prompt[start:stop])
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)
    other = prompt.copy()
    other[0] = (other[0] + 1) % 97
    assert not np.allclose(engine(name).feed(other).numpy(), whole.numpy(), rtol=0, atol=1e-4), "the first token would not matter"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_is_the_same_in_each_process(journeys: dict[str, tuple[Any, Any]], name: str) -> None:
    """Two processes that build one model learn one layout from it, and models that differ in their dtype have two."""
    learned = {dtype: engine(name, dtype).layout().fingerprint.hex() for dtype in DTYPES}
    assert learned == {dtype: journeys[f"{name} {dtype}"][1]["layout"] for dtype in DTYPES}
    assert len(set(learned.values())) == len(DTYPES)
