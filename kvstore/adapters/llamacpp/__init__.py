"""llama.cpp as an engine: models with attention, sliding windows, recurrent layers, or a mix of these.

The adapter takes a loaded library, the address of a `llama_context` and plain arguments. It declares no structs, so one
adapter serves every build that exports the sequence state functions: xllamacpp's library as well as llama-cpp-python's.
"""

from kvstore.adapters.llamacpp.engine import LlamaCppEngine
from kvstore.adapters.llamacpp.errors import BlobError, LlamaCppError

__all__ = ["BlobError", "LlamaCppEngine", "LlamaCppError"]
