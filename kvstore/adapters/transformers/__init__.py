"""Hugging Face Transformers as an engine: any model whose state is a `DynamicCache`, one sequence at a time.

Full attention, sliding windows, chunked attention, linear attention, state space models, and mixtures of them. Needs torch and
transformers: `pip install "kvstore[transformers]"`.
"""

from kvstore.adapters.transformers.engine import TransformersEngine
from kvstore.adapters.transformers.generating import Generated
from kvstore.adapters.transformers.identity import weights_digest
from kvstore.adapters.transformers.sessions import TransformersSessions

__all__ = ["Generated", "TransformersEngine", "TransformersSessions", "weights_digest"]
