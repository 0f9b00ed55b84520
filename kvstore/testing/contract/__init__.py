"""The contract suite for engines: what the author of an adapter runs against it, with pytest or without."""

from kvstore.testing.contract.driver import EngineDriver
from kvstore.testing.contract.report import CheckResult, ContractError, ContractReport
from kvstore.testing.contract.setting import positions_needed
from kvstore.testing.contract.suite import ContractCheck, check_engine, contract_checks

__all__ = [
    "CheckResult",
    "ContractCheck",
    "ContractError",
    "ContractReport",
    "EngineDriver",
    "check_engine",
    "contract_checks",
    "positions_needed",
]
