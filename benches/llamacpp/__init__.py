"""A small driver for llama.cpp: loads a model and evaluates tokens, pinned to one build of xllamacpp.

Everything here needs C structs, which differ from build to build. The adapter in `kvstore.adapters.llamacpp` does not: it
takes the library, a context's address and plain arguments, and serves any build.
"""

from benches.llamacpp.context import Context
from benches.llamacpp.library import DriverError, Library, WrongBuildError
from benches.llamacpp.model import Model, smollm2_path

__all__ = ["Context", "DriverError", "Library", "Model", "WrongBuildError", "smollm2_path"]
