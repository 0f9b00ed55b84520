"""What came out of a run of the contract suite."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import KVStoreError

__all__ = ["Broken", "CheckResult", "ContractError", "ContractReport"]


class ContractError(KVStoreError, AssertionError):
    """An engine breaks its contract with kvstore. The message names each check that failed, what was seen and what to do."""


class Broken(Exception):
    """Raised inside a check: what was seen that must not be."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of the suite.

    Attributes
    ----------
    name : str
        The check's name.
    passed : bool
        Whether the engine holds it.
    seen : str
        What was tried, or what was seen that must not be.
    advice : str
        What to do where it failed; else empty.
    """

    name: str
    passed: bool
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{'ok    ' if self.passed else 'FAILED'} {self.name}: {self.seen}"
        return f"{line}\n       to do: {self.advice}" if self.advice else line


@dataclass(frozen=True, slots=True)
class ContractReport:
    """The results of all checks, in the order in which they ran. Prints as one line for each.

    Attributes
    ----------
    model : str
        Of the engine's layout.
    checks : tuple of CheckResult
        All of them.
    """

    model: str
    checks: tuple[CheckResult, ...]

    def __str__(self) -> str:
        head = f"contract of engine {self.model!r}: {len(self.checks)} checks, {len(self.failures)} failed"
        return "\n".join([head, *map(str, self.checks)])

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that the engine doesn't hold."""
        return tuple(check for check in self.checks if not check.passed)

    def raise_for_failures(self) -> None:
        """Raise if a check failed.

        Raises
        ------
        ContractError
            Names each failed check, what was seen and what to do.
        """
        if self.failures:
            failed = "\n".join(map(str, self.failures))
            raise ContractError(f"engine {self.model!r} breaks its contract in {len(self.failures)} checks:\n{failed}")
