"""The real model and the tiny ones, loaded once, and engines on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the driver lies in benches/, which is not installed

from benches.llamacpp import Context, Model, smollm2_path
from kvstore.adapters.llamacpp import LlamaCppEngine

from .tiny import write_models

Make = Callable[..., tuple[Context, LlamaCppEngine]]


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    """SmolLM2-135M-Instruct."""
    with Model(smollm2_path()) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def tokens(model: Model) -> list[int]:
    """Four hundred tokens of prose, and then some."""
    text = "The keeper of the light at Gannet Rock wrote down, every evening, what the wind had done to the {} and to the {}. "
    things = ["boat", "ladder", "goat", "flag", "chimney", "lamp", "bell", "garden", "door", "coal"]
    return model.tokenize("".join(text.format(a, b) for a in things[:4] for b in things))[:480]


@pytest.fixture
def make(model: Model) -> Iterator[Make]:
    """Make contexts with an engine on them; they are closed after the test."""
    with ExitStack() as stack:

        def made(n_ctx: int = 512, probe: bool = True, **settings: Any) -> tuple[Context, LlamaCppEngine]:
            context = stack.enter_context(Context(model, n_ctx, **settings))
            engine = LlamaCppEngine(
                context.library.c,
                context.pointer,
                model="smollm2",
                identity=context.settings,
                probe=context.probe if probe else None,
            )
            return context, engine

        yield made


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Models of every kind, a few megabytes each, written anew."""
    paths = write_models(tmp_path_factory.mktemp("tiny"))
    with ExitStack() as stack:
        yield {name: stack.enter_context(Model(path)) for name, path in paths.items()}
