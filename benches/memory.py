"""memory: what a process takes, above the caller's arrays, while it saves and restores a long session."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from types import TracebackType

from benches.harness import Bench, Context, Needs, Outcome, Size, Target
from benches.sessions import TOKEN_BYTES, arrays_for, large_layout, random_tokens
from kvstore import Store

__all__ = ["BENCH"]

_EVERY = 0.002
_LIMIT_MIB = 256
_SIZES: dict[Size, int] = {"full": 100_000, "quick": 20_000, "smallest": 1500}


def _needs(size: Size) -> Needs:
    total = _SIZES[size] * TOKEN_BYTES
    return Needs(disk=2 * total + (256 << 20), memory=2 * total + (1 << 30))


def _anonymous(status: int) -> int:
    """RssAnon of this process, in bytes: its own memory, without the pages of mapped files."""
    text = os.pread(status, 4096, 0)
    at = text.index(b"RssAnon:")
    return int(text[at + 8 : text.index(b"kB", at)]) * 1024


class _Watch:
    """Samples RssAnon on a thread of its own while a `with` block runs.

    Attributes
    ----------
    before, peak : int
        Bytes at the start, and the most that was seen.
    samples : int
    longest_gap : float
        Seconds between two samples, at most: a peak shorter than that may have been missed.
    """

    def __init__(self) -> None:
        self.before = self.peak = self.samples = 0
        self.longest_gap = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)

    def __enter__(self) -> _Watch:
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc: what was freed before must not hide what is taken now
            ctypes.CDLL(None).malloc_trim(0)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self.before = self.peak = _anonymous(self._status)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._status)

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            self.peak = max(self.peak, _anonymous(self._status))
            self.samples += 1
            now = time.perf_counter()
            self.longest_gap = max(self.longest_gap, now - last)
            last = now
            time.sleep(_EVERY)

    @property
    def above_mib(self) -> float:
        """The peak above what there was at the start."""
        return (self.peak - self.before) / 2**20


def _run(context: Context) -> Outcome:
    tokens = _SIZES[context.size]
    layout = large_layout()
    prompt = random_tokens(4, tokens)
    context.say(f"making {tokens * TOKEN_BYTES / 1e9:.2f} GB of rows")
    arrays = arrays_for(layout, tokens)
    outcome = Outcome()
    with Store.open(context.scratch / "store", max_bytes=2 * tokens * TOKEN_BYTES + (256 << 20)) as store:
        namespace = store.namespace(layout)
        context.say("saving")
        with _Watch() as saving:
            namespace.save(prompt, arrays)
    with Store.open(context.scratch / "store") as store:
        namespace = store.namespace(layout)
        context.say("restoring")
        with _Watch() as restoring, namespace.lease(prompt) as lease:
            lease.copy_into(arrays)
    for name, watch in (("saving", saving), ("restoring", restoring)):
        outcome.figures[name] = {
            "above_mib": watch.above_mib,
            "samples": watch.samples,
            "longest_gap_ms": watch.longest_gap * 1e3,
        }
        outcome.lines.append(
            f"{name}: {watch.above_mib:.1f} MiB above the caller's arrays ({watch.samples} samples, at most "
            f"{watch.longest_gap * 1e3:.0f} ms apart)"
        )
        outcome.targets.append(Target(f"{name}: MiB above the caller's arrays", watch.above_mib, _LIMIT_MIB))
    return outcome


BENCH = Bench("memory", "the process's own memory above the caller's arrays while 1.6 GB are saved and restored", _needs, _run)
