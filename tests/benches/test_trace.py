"""Traces: reading, making up, and what caches at most reuse of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches.__main__ import main
from benches.trace import (
    SPAN,
    Request,
    TraceError,
    distinct_blocks,
    least_recently_used,
    optimum,
    read_trace,
    synthetic_trace,
    unbounded,
)


def _lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _record(ids: Sequence[object], length: int | None = None, at: float = 0) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length or len(ids) * SPAN, "output_length": 5, "hash_ids": list(ids)}


def _paths(choices: Sequence[tuple[int, int]]) -> list[Request]:
    """Requests along paths of a binary tree: which way to go, and how deep; then one block of each one's own."""
    made = []
    for place, (way, depth) in enumerate(choices):
        ids = [(1 << n) | (way & ((1 << n) - 1)) for n in range(1, depth + 1)]
        made.append(Request(float(place), depth * SPAN + 1, 1, (*ids, 100 + place)))
    return made


def test_reads_requests(tmp_path: Path) -> None:
    """A file's ids are numbered densely, its times begin at 0, and only as many requests are read as are wanted."""
    path = _lines(tmp_path / "t", _record([7, 9], 600, 1000), _record([7, 4, 12], 1500, 3000), _record([1]))
    found = read_trace(path, 2)
    assert [(r.at, r.length, r.ids) for r in found] == [(0.0, 600, (0, 1)), (2.0, 1500, (0, 2, 3))]
    assert distinct_blocks(found) == 4


def test_tokens_follow_from_ids(tmp_path: Path) -> None:
    """Prompts have exactly the prefixes in common that their ids say, and the length that they say."""
    one, other = read_trace(_lines(tmp_path / "t", _record([1, 2, 3], 1300), _record([1, 2, 4], 1536)))
    a, b = one.tokens(), other.tokens()
    assert (a.size, b.size, a.dtype.name) == (1300, 1536, "uint32")
    assert np.array_equal(a[:1024], b[:1024])
    assert not set(a[1024:].tolist()) & set(b.tolist())


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "{}",
        json.dumps(_record([1, 2], 500)),
        json.dumps(_record(["x"])),
        json.dumps(_record([1]) | {"input_length": 0}),
    ],
)
def test_what_is_no_trace_is_named(line: str, tmp_path: Path) -> None:
    """A line that is no request is refused with its number."""
    path = tmp_path / "t"
    path.write_text(json.dumps(_record([1])) + "\n" + line + "\n")
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="no request"):
        read_trace(path)


def _best(requests: Sequence[Request], capacity: int) -> int:
    """The most blocks that can be hit, by trying everything that a cache may keep, prefixes only."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    parents = {span: before for r in requests for before, span in itertools.pairwise((None, *r.ids))}
    for request in requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = sum(1 for _ in itertools.takewhile(held.__contains__, request.ids))
            for size in range(capacity + 1):
                for kept in itertools.combinations(held | set(request.ids), size):
                    whole = frozenset(kept)
                    if all(parents[span] is None or parents[span] in whole for span in kept):
                        following[whole] = max(following.get(whole, 0), hits + found)
        states = following
    return max(states.values())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=6), st.integers(1, 3))
def test_the_optimum_is_the_best(choices: list[tuple[int, int]], capacity: int) -> None:
    """No cache that keeps prefixes reuses more blocks than the optimum says, one reuses as many, and LRU no more."""
    requests = _paths(choices)
    best = optimum(requests, capacity)
    assert best.hit_blocks == _best(requests, capacity)
    assert least_recently_used(requests, capacity).hit_blocks <= best.hit_blocks
    everything = unbounded(requests)
    assert optimum(requests, 1000) == everything == least_recently_used(requests, 1000)


def test_lru_forgets_the_oldest() -> None:
    """A prefix is found again as long as no more blocks were used since than the cache holds, and its end goes first."""
    a, b = Request(0, 2 * SPAN, 1, (1, 2)), Request(0, 2 * SPAN, 1, (3, 4))
    assert least_recently_used([a, b, a], 4).hit_tokens == 2 * SPAN - 1
    assert least_recently_used([a, b, a], 3).hit_tokens == SPAN
    assert least_recently_used([a, b, a], 2).hit_tokens == 0


def test_the_synthetic_trace_is_like_a_real_one() -> None:
    """The same seed gives the same requests; equal ids mean equal prefixes; and the statistics are those of the known trace."""
    requests = synthetic_trace(12_031)
    assert requests == synthetic_trace(12_031)
    assert requests != synthetic_trace(12_031, seed=2)
    assert all(len(r.ids) == -(-r.length // SPAN) and r.output > 0 for r in requests)
    assert all(a.at <= b.at for a, b in itertools.pairwise(requests))
    before: dict[int, int] = {}
    for request in requests:
        for parent, span in itertools.pairwise((-1, *request.ids)):
            assert before.setdefault(span, parent) == parent
    # of the real one: 12,035 tokens on average, 0.374 of them seen before, 182,790 blocks
    everything, blocks = unbounded(requests), distinct_blocks(requests)
    assert 11_000 < everything.tokens / len(requests) < 13_000
    assert 0.34 < everything.rate < 0.41
    assert 165_000 < blocks < 200_000
    assert 3000 < requests[-1].at < 4200
    for share, rate in ((5, 0.200), (10, 0.284), (25, 0.360)):
        assert abs(least_recently_used(requests, blocks * share // 100).rate - rate) < 0.05


def test_a_named_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace` replays the file, and the result says so; what is no trace, or not there, is a message."""
    path = _lines(tmp_path / "own.jsonl", *(_record([0, n % 3, 10 + n], at=n) for n in range(12)))
    arguments = ["run", "trace", "--size", "smallest", "--dir", str(tmp_path / "s"), "--results", str(tmp_path / "r"), "--trace"]
    assert main([*arguments, str(path)]) == 0
    (result,) = (tmp_path / "r").iterdir()
    figures = json.loads(result.read_text())["figures"]
    assert "own.jsonl" in figures["source"]
    (cap,) = figures["caps"].values()
    # 1 of 3 blocks is common to all, from the second on; another one from the fourth on
    assert cap["hit_rate"] == cap["optimum_rate"] == pytest.approx((11 + 9) / 36, abs=0.001)
    path.write_text("nonsense\n")
    assert main([*arguments, str(path)]) == 1
    assert "line 1" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "missing")]) == 2
    assert "--trace" in capsys.readouterr().err
    assert not list((tmp_path / "s").iterdir())
