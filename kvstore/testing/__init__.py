"""For tests of engines and stores: the contract suite, synthetic engines, and sessions whose every byte follows from their tokens.

Ships with the library, for authors of adapters; nothing in the library itself imports it.
"""

from kvstore.testing.chat import Conversation, Reply, serve
from kvstore.testing.contract import (
    CheckResult,
    ContractCheck,
    ContractError,
    ContractReport,
    EngineDriver,
    check_engine,
    contract_checks,
    positions_needed,
)
from kvstore.testing.differences import Difference, differences
from kvstore.testing.engine import HashEngine
from kvstore.testing.hybrid import SyntheticHybrid, hybrid_layout
from kvstore.testing.in_order import chunks_in_order
from kvstore.testing.sessions import destination, session_rows, session_states, states_equal

__all__ = [
    "CheckResult",
    "ContractCheck",
    "ContractError",
    "ContractReport",
    "Conversation",
    "Difference",
    "EngineDriver",
    "HashEngine",
    "Reply",
    "SyntheticHybrid",
    "check_engine",
    "chunks_in_order",
    "contract_checks",
    "destination",
    "differences",
    "hybrid_layout",
    "positions_needed",
    "serve",
    "session_rows",
    "session_states",
    "states_equal",
]
