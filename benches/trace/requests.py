"""Requests of a chat service as published traces have them: lengths, and an id for each span of the prompt; no text.

A file has a JSON object a line: `timestamp` (milliseconds), `input_length` and `output_length` (tokens), and `hash_ids`, one id for
each 512 tokens of the prompt, the last of which may be fewer. Equal ids mean prompts that are equal up to the end of that span.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["SPAN", "Request", "TraceError", "distinct_blocks", "read_trace"]

SPAN = 512
_LARGEST_ID = 2**32 // SPAN


class TraceError(ValueError):
    """A file is not a trace of requests; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes
    ----------
    at : float
        Seconds since the first one.
    length, output : int
        Tokens of the prompt and of the answer.
    ids : tuple of int
        One for each span of the prompt, numbered densely from 0.
    """

    at: float
    length: int
    output: int
    ids: tuple[int, ...]

    def tokens(self) -> npt.NDArray[np.uint32]:
        """The prompt: 512 tokens that no other id has for each id, cut to the prompt's length."""
        starts = np.array([span * SPAN for span in self.ids], np.uint32)
        tokens = np.add.outer(starts, np.arange(SPAN, dtype=np.uint32)).astype(np.uint32).reshape(-1)
        return tokens[: self.length]

    def tokens_of(self, spans: int) -> int:
        """Tokens in the first spans."""
        return min(spans * SPAN, self.length)


def distinct_blocks(requests: Iterable[Request]) -> int:
    """How many different ids there are."""
    return len({span for request in requests for span in request.ids})


def read_trace(path: Path, most: int | None = None) -> list[Request]:
    """Read the first requests of a trace file.

    Raises
    ------
    TraceError
        When a line is no request.
    OSError
        When the file can't be read.
    """
    found: list[Request] = []
    numbers: dict[int, int] = {}
    first = 0.0
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, 1):
            if len(found) == most:
                break
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
                at, length, output = float(raw["timestamp"]), int(raw["input_length"]), int(raw["output_length"])
                ids: Sequence[int] = raw["hash_ids"]
                if length < 1 or len(ids) != -(-length // SPAN):
                    raise ValueError(f"{len(ids)} ids for {length} tokens, expected one for each {SPAN}")
                first = at if not found else first
                dense = tuple(numbers.setdefault(int(span), len(numbers)) for span in ids)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {place} is no request of a trace: {error!r}") from error
            found.append(Request((at - first) / 1000, length, output, dense))
    if not found:
        raise TraceError(f"{path} holds no request")
    if len(numbers) > _LARGEST_ID:
        raise TraceError(f"{path} has {len(numbers)} different ids, more than the {_LARGEST_ID} that tokens can be made for")
    return found
