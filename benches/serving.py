"""The side of a child process: requests from stdin, events to stdout. See `benches.children`.

A peer's process uses it as well, in its own environment: only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Operations", "Send", "serve"]

Operations = Mapping[str, Callable[..., dict[str, Any]]]
_MESSAGE = 500  # characters


class Send(Protocol):
    """Sends an event."""

    def __call__(self, **event: object) -> None:
        """Send it."""


def serve(start: Callable[[Send], AbstractContextManager[Operations]]) -> int:
    """Answer requests until stdin ends; whatever is printed, by C code too, goes to stderr. Returns the process's exit status.

    Parameters
    ----------
    start : callable
        Takes what sends an event (one that is ready before it is asked sends ``event="ready"``), and gives what is to be open
        meanwhile: entered, the operations by name. What they return is the answer.
    """
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def send(**event: object) -> None:
        channel.write(json.dumps(event) + "\n")

    try:
        with start(send) as operations:
            for line in sys.stdin:
                request = json.loads(line)
                send(event="done", **operations[request.pop("op")](**request))
    except (KeyboardInterrupt, BrokenPipeError):
        return 130  # whoever asks is going away, and says so itself
    except Exception as error:  # whoever asks reports it, whatever it is
        traceback.print_exc()
        send(event="error", message=f"{type(error).__name__}: {error}"[:_MESSAGE])
        return 1
    return 0
