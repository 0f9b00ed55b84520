"""For tests of engines and stores: a synthetic engine, and sessions whose every byte follows from their tokens.

Ships with the library, for authors of adapters; nothing in the library itself imports it.
"""

from kvstore.testing.engine import HashEngine
from kvstore.testing.sessions import destination, session_rows, session_states, states_equal

__all__ = ["HashEngine", "destination", "session_rows", "session_states", "states_equal"]
