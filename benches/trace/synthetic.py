"""A made-up trace of a chat service, for those who have no real one.

Conversations begin at random. Each goes on, after a pause, with a probability that grows with its turns: the next prompt is the
last one, its answer and a new question. Some prompts begin like an earlier one and then go another way (edited history, a document
that several ask about). Many short prompts are never heard of again. All prompts begin with the same span. How long, how often
and how soon is drawn from the tables below, which are those of one hour of a public trace of 12,031 requests.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from dataclasses import dataclass

from benches.trace.requests import SPAN, Request

__all__ = ["synthetic_trace"]

_PER_SECOND = 2.28  # prompts that continue none
_SHORT = 0.137  # of them are short and never continued; so many tokens they have:
_SHORT_TOKENS = (891, 939)
_DIVERGING = 0.087  # of them begin like an earlier one
_GOES_ON = (0.34, 0.37, 0.49, 0.54, 0.60, 0.62, 0.70, 0.70)  # by the turns that a conversation has had
_LONG, _LESS = 8000, 0.9  # a prompt of so many tokens goes on less often, by this factor
_LONGEST = 100_000  # tokens that a prompt has at most which goes on

# values at equal steps of the share of requests that have less
_FIRST = (
    *(940, 1062, 1250, 1509, 2013, 3058, 3992, 4542, 5118, 5832, 6743),
    *(7889, 9173, 10851, 12731, 15091, 18001, 21816, 28220, 41774),
)
_FIRST_TAIL = (41_774, 126_000)  # the last twentieth: from, to, by a power law
_OUTPUT = (1, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543, 597, 698, 2000)
_AGAIN = 0.03  # of the prompts that continue one are the same
_GROWTH = (2, 20, 63, 124, 192, 260, 313, 357, 395, 433, 471, 507, 553, 608, 684, 831, 1290, 2845, 4599, 7338)
_GROWTH_TAIL = (7338, 60_000)
_PAUSE = (1, 27, 39, 50, 57, 66, 74, 83, 95, 108, 123, 140, 162, 189, 225, 266, 318, 387, 474, 606, 2400)  # seconds
_COMMON = (
    *(0.01, 0.05, 0.07, 0.08, 0.1, 0.11, 0.13, 0.15, 0.17, 0.19, 0.21),
    *(0.25, 0.29, 0.34, 0.4, 0.45, 0.52, 0.68, 0.83, 0.91, 0.99),
)
_DIVERGING_FROM = 10_000  # tokens that an earlier prompt has at least of which another begins like it


def _draw(chance: random.Random, table: tuple[float, ...], tail: tuple[float, float] | None = None) -> float:
    """A value by a table of quantiles; with a tail, the table ends where that begins."""
    at = chance.random() * (len(table) if tail else len(table) - 1)
    step = int(at)
    if tail and step == len(table) - 1:
        low, high = tail
        return float(low * (high / low) ** ((at - step) ** 2))
    return table[step] + (table[step + 1] - table[step]) * (at - step)


@dataclass(frozen=True, slots=True)
class _Turn:
    request: Request
    turns: int


class _Maker:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._fresh = itertools.count(1)  # ids of spans; 0 is the one that all begin with
        self._long: list[_Turn] = []  # in order of time

    def _request(self, at: float, length: int, common: tuple[int, ...]) -> Request:
        spans = -(-length // SPAN)
        common = common[:spans] or (0,)
        ids = common + tuple(next(self._fresh) for _ in range(spans - len(common)))
        return Request(at, length, max(int(_draw(self.chance, _OUTPUT)), 1), ids)

    def next_turn(self, at: float, last: _Turn) -> _Turn:
        """What continues a conversation."""
        before, chance = last.request, self.chance
        growth = 0 if chance.random() < _AGAIN else int(_draw(chance, _GROWTH, _GROWTH_TAIL))
        # the last span of a prompt is whole in the next one, and so another
        common = before.ids if not growth else before.ids[: before.length // SPAN]
        return _Turn(self._request(at, before.length + growth, common), last.turns + 1)

    def first_turn(self, at: float) -> _Turn:
        """What continues none."""
        chance = self.chance
        kind = chance.random()
        if kind < _SHORT:
            return _Turn(self._request(at, chance.randint(*_SHORT_TOKENS), ()), 1)
        length = int(_draw(chance, _FIRST, _FIRST_TAIL))
        if kind > 1 - _DIVERGING and self._long:
            place = bisect.bisect(self._long, at - _draw(chance, _PAUSE), key=lambda turn: turn.request.at)
            other = self._long[max(place - 1, 0)].request
            shared = max(int(_draw(chance, _COMMON) * len(other.ids)), 2)
            return _Turn(self._request(at, max(length, (shared + 1) * SPAN), other.ids[:shared]), 2)
        return _Turn(self._request(at, length, ()), 1)

    def goes_on(self, turn: _Turn) -> float | None:
        """After how many seconds a conversation goes on, if it does."""
        length = turn.request.length
        if length >= _DIVERGING_FROM:
            self._long.append(turn)
        goes_on = _GOES_ON[min(turn.turns, len(_GOES_ON)) - 1] * (_LESS if length > _LONG else 1.0)
        if not _SHORT_TOKENS[1] < length < _LONGEST or self.chance.random() >= goes_on:
            return None
        return _draw(self.chance, _PAUSE)


def synthetic_trace(count: int, seed: int = 1) -> list[Request]:
    """Make up a trace: the same for the same arguments."""
    maker = _Maker(seed)
    made: list[Request] = []
    waiting: list[tuple[float, int, _Turn]] = []  # turns that will be continued: when, a number to decide ties
    arrival = 0.0
    while len(made) < count:
        if waiting and waiting[0][0] < arrival:
            at, _, last = heapq.heappop(waiting)
            turn = maker.next_turn(at, last)
        else:
            at, turn = arrival, maker.first_turn(arrival)
            arrival += maker.chance.expovariate(_PER_SECOND)
        made.append(turn.request)
        pause = maker.goes_on(turn)
        if pause is not None:
            heapq.heappush(waiting, (at + pause, len(made), turn))
    return made
