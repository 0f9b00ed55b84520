"""Prompts of a wanted length: the system text, a record with its facts near the beginning, and the first question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benches.demo.text import SYSTEM, Story

__all__ = ["LONGEST", "SHORTEST", "TURNS", "first_prompt", "shared_prefix"]

TURNS = 4
SHORTEST = 600  # the system text and the facts take nearly that
LONGEST = 7600  # the model's context of 8192 less the later turns

Tokenize = Callable[[str], list[int]]


def first_prompt(story: Story, length: int, tokenize: Tokenize) -> list[int]:
    """Make the first prompt of a story with as many sentences as fit into `length` tokens, tokenised as a whole."""

    def prompt(sentences: int) -> list[int]:
        return tokenize(SYSTEM + story.opening() + story.body(sentences) + story.ending(1))

    low, high = 0, length // 8  # no sentence is shorter than eight tokens
    while low < high:
        middle = (low + high + 1) // 2
        if len(prompt(middle)) <= length:
            low = middle
        else:
            high = middle - 1
    return prompt(low)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Count the leading tokens that all prompts have in common."""
    count = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count
