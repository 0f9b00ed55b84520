"""Saving: gather what is new from an engine's arrays, hash it, publish it in durable steps."""

from kvstore.saving.check import Comparison, compare_stored
from kvstore.saving.gather import check_states, check_streams, gather_rows, gather_states, release
from kvstore.saving.publish import Piece, StatesPiece, publish_piece, publish_states
from kvstore.saving.save import Saver, SaveResult, group_blocks, stored_prefix, touch_stored

__all__ = [
    "Comparison",
    "Piece",
    "SaveResult",
    "Saver",
    "StatesPiece",
    "check_states",
    "check_streams",
    "compare_stored",
    "gather_rows",
    "gather_states",
    "group_blocks",
    "publish_piece",
    "publish_states",
    "release",
    "stored_prefix",
    "touch_stored",
]
