"""The driver: the pinned build, and what it refuses."""

import numpy as np
import pytest

from benches.llamacpp import Context, DriverError, Library, WrongBuildError, structs
from benches.llamacpp.library import _find
from benches.llamacpp.model import Model

from .conftest import Make

pytestmark = pytest.mark.model


def test_another_version_is_refused() -> None:
    """Another version of the wheel is refused with the command that installs the right one, before it is loaded."""
    with pytest.raises(WrongBuildError, match="pip install xllamacpp=="):
        Library(_find(), version="2026.1.1")


def test_other_defaults_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose structs have other defaults is refused with the fields that differ."""
    monkeypatch.setitem(structs.CONTEXT_DEFAULTS, "n_ubatch", 511)
    with pytest.raises(WrongBuildError, match="n_ubatch"):
        Library(_find(), version="2026.10.11549")


def test_tokens_survive_a_round_trip(model: Model) -> None:
    """Plain text comes back from its tokens as it was."""
    text = "The pass phrase of the lighthouse keeper is silver walnut."
    assert model.detokenize(model.tokenize(text)) == text


def test_a_truncated_context_reads_on_as_before(make: Make, tokens: list[int]) -> None:
    """A context that is cut back and reads the same tokens in the same batches gives the same logits, bit for bit."""
    context, _ = make()
    context.decode(tokens[:128], 0)
    first = context.decode(tokens[128:160], 128)
    context.truncate(128)
    assert np.array_equal(context.decode(tokens[128:160], 128), first)


def test_refusals_carry_the_engines_words(make: Make) -> None:
    """What llama.cpp logs about a refusal is part of the error."""
    context, _ = make()
    with pytest.raises(DriverError, match="invalid seq_id"):
        context.decode([1], 0, seq=5)
    with pytest.raises(DriverError, match="nothing"):
        context.decode([], 0)


def test_closed_things_say_so(model: Model) -> None:
    """A closed context raises instead of crashing, and closing twice is harmless."""
    context = Context(model, 256)
    context.close()
    context.close()
    for use in (lambda: context.decode([1], 0), context.position, lambda: context.truncate(0), lambda: context.pointer):
        with pytest.raises(DriverError, match="closed"):
            use()
