"""A chat over a tier: a client that keeps the history, a server that answers, and reasoning that never comes back.

The server sends the answer alone, the model's reasoning stays hidden. So what the client sends next does not begin with all
that the engine has read: it shares the last prompt, up to the turn's boundary, and parts from it there. A client also branches
off: it asks for another answer, or edits an earlier question and goes on from there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvstore.ids import TokenArray, image_tokens
from kvstore.testing.hybrid.engine import VOCABULARY, SyntheticHybrid
from kvstore.tier import SessionTier

__all__ = ["Conversation", "Reply", "serve"]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a server has done for one request.

    Attributes
    ----------
    prompt, reasoning, answer : uint32 array
        What came, what stays hidden, what goes to the client. Checkpoints were saved at the end of the prompt (the turn's
        boundary) and at the end of the answer.
    reused : int
        Tokens of the prompt that were restored.
    """

    prompt: TokenArray
    reasoning: TokenArray
    answer: TokenArray
    reused: int

    @property
    def everything(self) -> TokenArray:
        """All tokens that the engine has read."""
        read: TokenArray = np.concatenate([self.prompt, self.reasoning, self.answer])
        return read


def serve(
    tier: SessionTier, engine: SyntheticHybrid, prompt: TokenArray, *, seed: int = 0, reasoning: int = 16, answer: int = 12
) -> Reply:
    """Answer a request, as a server does: promote, read, cascade, reason and answer, cascade.

    Parameters
    ----------
    tier : SessionTier
        Over `engine`.
    engine : SyntheticHybrid
        May hold anything.
    prompt : uint32 array
        What the client has sent.
    seed : int
        Another seed is another answer.
    reasoning, answer : int
        Tokens to generate.
    """
    reused = tier.promote(prompt)
    engine.feed(prompt[reused:])
    tier.cascade(prompt)
    hidden, shown = engine.decode(reasoning, seed=seed), engine.decode(answer, seed=seed)
    reply = Reply(prompt, hidden, shown, reused)
    tier.cascade(reply.everything)
    return reply


@dataclass(slots=True)
class Conversation:
    """A client's side of a chat: what it sends, one request after another, branches included.

    Attributes
    ----------
    seed : int
        Decides everything: the same requests for the same answers.
    images : int
        Of so many questions one, on average, comes with an image; 0 for none.
    turns : list of (question, answer)
        The history as the client shows it.
    requests : int
        How many were made.
    """

    seed: int = 0
    images: int = 5
    turns: list[tuple[TokenArray, TokenArray]] = field(default_factory=list)
    requests: int = 0
    _chance: random.Random = field(init=False, repr=False)
    _system: TokenArray = field(init=False, repr=False)
    _question: TokenArray | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._system = self._text(60)

    def request(self) -> tuple[Literal["ask", "regenerate", "edit"], TokenArray]:
        """Say what the user does next, and what the client sends for it."""
        dice = self._chance.random()
        self.requests += 1
        if len(self.turns) > 2 and dice < 0.15:
            self._question = self.turns.pop()[0]
            return "regenerate", self._prompt()
        if len(self.turns) > 2 and dice < 0.3:
            del self.turns[self._chance.randrange(len(self.turns) // 2, len(self.turns)) :]
            self._question = self._ask()
            return "edit", self._prompt()
        self._question = self._ask()
        return "ask", self._prompt()

    def receive(self, answer: TokenArray) -> None:
        """Take the answer to the last request: the model's reasoning isn't in it."""
        if self._question is None:
            raise ValueError("there is no open request; call request() first")
        self.turns.append((self._question, answer))
        self._question = None

    def _prompt(self) -> TokenArray:
        assert self._question is not None
        said = [tokens for turn in self.turns for tokens in turn]
        prompt: TokenArray = np.concatenate([self._system, *said, self._question])
        return prompt

    def _ask(self) -> TokenArray:
        question = self._text(self._chance.randint(3, 40))
        if self.images and not self._chance.randrange(self.images):
            question = np.concatenate([image_tokens(self._chance.randbytes(32), 20), question])
        return question

    def _text(self, count: int) -> TokenArray:
        return np.array([self._chance.randrange(VOCABULARY) for _ in range(count)], np.uint32)
