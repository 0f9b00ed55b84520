"""The suite: all checks by name, run one by one or together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.testing.contract import captures, controls, equality, failures
from kvstore.testing.contract.driver import E, EngineDriver
from kvstore.testing.contract.report import Broken, CheckResult, ContractError, ContractReport
from kvstore.testing.contract.setting import Setting, default_length

__all__ = ["CHECKS", "ContractCheck", "check_engine", "contract_checks"]

_SPARE_BYTES = 64 << 20
_SESSIONS = 8  # at most so many of one check are stored at once, their common blocks counted twice

# name: what to do where it fails
CHECKS: dict[str, str] = {
    "same_layout": "put into the layout what the model and its configuration decide, and nothing of this engine or this run",
    "deterministic": "nothing else can be said until this holds: fix the seed, the batches and the number of threads in the driver",
    "round_trip": "hand out in `capture` and take in `apply` all that the engine holds: what is missing needs a stream or a state",
    "block_boundaries": "see round_trip; look at the last block, which holds fewer rows, and at rows that stand for several tokens",
    "offered_positions": "take `restored.length` positions, whatever was saved; describe what can't be cut at any token as a state",
    "dirty_engine": "in `apply` forget what the engine held: lengths, masks, caches of its own, rows behind `restored.length`",
    "restored_twice": "after `apply` the engine must be able to hand out all rows again, restored ones too",
    "overwritten_at_once": "hand out in `capture` only what is in place already: synchronise with the device before it returns",
    "shared_prefix": "rows and states must follow from the tokens before them alone, and from nothing of the engine's past",
    "two_at_once": "an engine shares no memory with another one; nor do their rows lie in each other's place",
    "capture_in_pieces": "`capture(start, stop)` hands out these rows only, and states only if the engine stands at `stop`",
    "capture_twice": "`capture` must change nothing in the engine",
    "reset_forgets": "`reset` must leave the engine as a new one, whatever happened to it before",
    "failed_apply": "let errors pass out of `apply`, and have `reset` clear whatever a restore had changed by then",
    "negative_controls": (
        "have the engine read what `apply` gives it; or take the part out of the layout; or have `observe` say what follows from it"
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class ContractCheck(Generic[E]):
    """One check of one engine. Its string is its name, for pytest's ids.

    Attributes
    ----------
    name : str
        One of `CHECKS`.
    driver : EngineDriver
        The engine's.
    length : int
        Tokens of the sessions; 0 for two blocks and a half.
    seed : int
        Another seed, other tokens.
    """

    name: str
    driver: EngineDriver[E]
    length: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def try_out(self, store_path: str | os.PathLike[str]) -> CheckResult:
        """Run the check and say what came of it. Whatever the engine or its driver raises is a failure.

        Parameters
        ----------
        store_path : path
            A directory for a store; made if it isn't there. What the check stores is evicted in the end.
        """
        try:
            engine = self.driver.make()
            try:
                layout = engine.layout()
            finally:
                self.driver.close(engine)
            length = _length(layout, self.length)
            with Store.open(store_path, max_bytes=_cap(layout, length)) as store:
                setting = Setting(self.driver, layout, store, self.name, length=length, seed=self.seed)
                try:
                    seen = _function(self.name)(setting)
                finally:
                    setting.forget()
        except Broken as broken:
            return CheckResult(self.name, False, str(broken), CHECKS[self.name])
        except Exception as error:
            return CheckResult(self.name, False, f"{type(error).__name__}: {error}", CHECKS[self.name])
        return CheckResult(self.name, True, seen)

    def run(self, store_path: str | os.PathLike[str]) -> CheckResult:
        """Run the check as a test case.

        Raises
        ------
        ContractError
            When the engine doesn't hold it.
        """
        result = self.try_out(store_path)
        if not result.passed:
            raise ContractError(f"the engine breaks its contract:\n{result}")
        return result


def contract_checks(driver: EngineDriver[E], *, length: int = 0, seed: int = 0) -> tuple[ContractCheck[E], ...]:
    """List the suite's checks of an engine, to run each as a test case. Makes no engine yet.

    Examples
    --------
    >>> @pytest.mark.parametrize("check", contract_checks(MyDriver()), ids=str)
    ... def test_contract(check, tmp_path):
    ...     check.run(tmp_path / "store")
    """
    return tuple(ContractCheck(name, driver, length, seed) for name in CHECKS)


def check_engine(driver: EngineDriver[E], *, store_path: str | os.PathLike[str], length: int = 0, seed: int = 0) -> ContractReport:
    """Run the whole contract suite against an engine, over a real store.

    Parameters
    ----------
    driver : EngineDriver
        Makes engines, has them read, looks into them.
    store_path : path
        A directory for the suite's store; made if it isn't there, and left there, empty of sessions.
    length : int
        Tokens of the sessions that are saved: more than two blocks. By default two blocks and a half, and one. A layout with
        large blocks makes a slow suite: give it a smaller `block_tokens` for this. Engines need room for more
        (`positions_needed`).
    seed : int
        Another seed, other tokens.

    Returns
    -------
    ContractReport
        All checks, whether they passed, and what was seen. `raise_for_failures()` makes a test of it.

    Raises
    ------
    ValueError
        When the length doesn't reach beyond two blocks.
    """
    engine = driver.make()
    try:
        layout = engine.layout()
    finally:
        driver.close(engine)
    _length(layout, length)
    checks = contract_checks(driver, length=length, seed=seed)
    return ContractReport(layout.model, tuple(check.try_out(store_path) for check in checks))


def _length(layout: Layout, length: int) -> int:
    least = 2 * layout.block_tokens + 2
    if length and length < least:
        raise ValueError(
            f"sessions of {length} tokens don't reach beyond two blocks of {layout.block_tokens}: give at least {least}, or a "
            "layout with smaller blocks (Layout(..., block_tokens=16))"
        )
    return length or default_length(layout)


def _cap(layout: Layout, length: int) -> int:
    blocks = -(-length // layout.block_tokens) + 1
    session = blocks * (layout.payload_bytes(layout.block_tokens) + (32 << 10)) + layout.states_bytes
    return _SPARE_BYTES + _SESSIONS * 2 * session


def _function(name: str) -> Callable[[Setting[E]], str]:
    for module in (equality, captures, failures, controls):
        if name in module.__all__:
            function: Callable[[Setting[E]], str] = getattr(module, name)
            return function
    raise ValueError(f"no check is called {name!r}; the checks are {', '.join(CHECKS)}")
