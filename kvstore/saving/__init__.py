"""Saving: gather what is new from an engine's arrays, hash it, publish it in durable steps."""

from kvstore.saving.gather import release
from kvstore.saving.publish import Piece, StatesPiece, publish_piece, publish_states
from kvstore.saving.save import SaveResult, Saver, stored_prefix

__all__ = ["Piece", "SaveResult", "Saver", "StatesPiece", "publish_piece", "publish_states", "release", "stored_prefix"]
