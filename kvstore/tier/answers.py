"""Answers that a client has left out of its history: what a session's next turn supersedes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.ids import common_tokens

__all__ = ["Answers"]

_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class _Answer:
    """A session with its answer, and where its prompt ended."""

    boundary: int
    session: bytes


class Answers:
    """The last 16 answers of a tier, until it is seen whether their clients send them back. One call at a time.

    A client that hides reasoning comes back to a turn's boundary and goes on from there: what was decoded behind it is never asked
    for again, and each turn would leave its states behind. Sessions are given as tokens, uint32 little-endian.
    """

    def __init__(self) -> None:
        self._recent: deque[_Answer] = deque(maxlen=_REMEMBERED)
        self._prompt = b""
        self._boundary = 0
        self._left: list[tuple[int, bytes]] = []  # with how many tokens the prompt has in common with them

    def asked(self, prompt: bytes, boundary: int) -> None:
        """Note that a request has begun, whose turn's checkpoint lies `boundary` tokens before the prompt's end.

        It leaves the answers without which it goes on from their prompts. The same prompt again leaves none: another answer to it
        is wanted beside the first. Nor does one with an answer whole: the others to its prompt may be another client's, or come
        back as well.
        """
        self._prompt, self._boundary = prompt, max(len(prompt) // 4 - boundary, 1)
        kept: list[_Answer] = []
        self._left = []
        came_back = [answer.boundary for answer in self._recent if prompt.startswith(answer.session)]
        for answer in self._recent:
            common = common_tokens(answer.session, prompt)
            if answer.boundary <= common < min(len(answer.session), len(prompt)) // 4:
                if answer.boundary in came_back:
                    kept.append(answer)
                else:
                    self._left.append((common, answer.session))
            elif common < len(answer.session) // 4:  # else it has become part of this one
                kept.append(answer)
        self._recent = deque(kept, _REMEMBERED)

    def cascaded(self, session: bytes) -> list[bytes]:
        """Note that a session is saved up to here; give, once, the answers of which it stores the way past.

        One that ends before they part, or is another session altogether, stores nothing in their place: what they share with the
        prompt would go with them.
        """
        left = [answer for common, answer in self._left if common_tokens(answer, session) == common < len(session) // 4]
        self._left = [(common, answer) for common, answer in self._left if answer not in left]
        if self._prompt and len(session) > len(self._prompt) and session.startswith(self._prompt):
            others = [answer for answer in self._recent if not session.startswith(answer.session)]
            self._recent = deque([*others, _Answer(self._boundary, session)], _REMEMBERED)
        return left
