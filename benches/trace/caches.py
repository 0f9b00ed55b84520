"""What a cache of so many blocks reuses of a trace: the best that one could do who knows the future, and plain LRU."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benches.trace.requests import SPAN, Request

__all__ = ["Reuse", "least_recently_used", "optimum", "unbounded"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What was found of all prompts together.

    Attributes
    ----------
    hit_tokens, tokens : int
        Leading tokens that were there, and all. At least one of each prompt is computed, as servers do to get logits.
    hit_blocks, blocks : int
        The same in blocks.
    """

    hit_tokens: int
    tokens: int
    hit_blocks: int
    blocks: int

    @property
    def rate(self) -> float:
        """Of all tokens, the share that was there."""
        return self.hit_tokens / self.tokens


class _Count:
    def __init__(self) -> None:
        self.hit_tokens = self.tokens = self.hit_blocks = self.blocks = 0

    def add(self, request: Request, hits: int) -> None:
        self.hit_tokens += min(hits * SPAN, request.length - 1)
        self.tokens += request.length
        self.hit_blocks += hits
        self.blocks += len(request.ids)

    def reuse(self) -> Reuse:
        return Reuse(self.hit_tokens, self.tokens, self.hit_blocks, self.blocks)


def unbounded(requests: Sequence[Request]) -> Reuse:
    """A cache without a limit."""
    held: set[int] = set()
    count = _Count()
    for request in requests:
        hits = next((n for n, span in enumerate(request.ids) if span not in held), len(request.ids))
        held.update(request.ids)
        count.add(request, hits)
    return count.reuse()


def least_recently_used(requests: Sequence[Request], capacity: int) -> Reuse:
    """A cache of whole blocks from which the one goes that was used longest ago; of one prompt, the last block first."""
    held: OrderedDict[int, None] = OrderedDict()
    count = _Count()
    for request in requests:
        hits = next((n for n, span in enumerate(request.ids) if span not in held), len(request.ids))
        for span in reversed(request.ids[:capacity]):
            held[span] = None
            held.move_to_end(span)
        while len(held) > capacity:
            held.popitem(last=False)
        count.add(request, hits)
    return count.reuse()


def optimum(requests: Sequence[Request], capacity: int) -> Reuse:
    """The most blocks that any cache of whole blocks can reuse (Belady): what is used again last goes first, or isn't taken in.

    A block can be used only together with all that precede it in its prompt, and those are used at least as soon as it is. So
    the rule, with ties decided for the earlier block of a prompt, never keeps a block without them: the optimum without
    this constraint satisfies it, and bounds every policy that has to.
    """
    # when a span is used next, seen from each of its uses; and how deep it lies, to decide ties
    never = len(requests)
    following: list[list[int]] = []
    upcoming: dict[int, int] = {}
    for place in range(len(requests) - 1, -1, -1):
        ids = requests[place].ids
        following.append([upcoming.get(span, never) for span in ids])
        for span in ids:
            upcoming[span] = place
    following.reverse()

    held: dict[int, int] = {}  # span: its next use
    queue: list[tuple[int, int, int]] = []  # (-next use, -depth, span), entries of earlier uses among them
    count = _Count()
    for request, uses in zip(requests, following, strict=True):
        hits = next((n for n, span in enumerate(request.ids) if span not in held), len(request.ids))
        for depth, (span, use) in enumerate(zip(request.ids, uses, strict=True)):
            if use == never:
                held.pop(span, None)
                continue
            held[span] = use
            heapq.heappush(queue, (-use, -depth, span))
        while len(held) > capacity:
            use, _, span = heapq.heappop(queue)
            if held.get(span) == -use:
                del held[span]
        count.add(request, hits)
    return count.reuse()
