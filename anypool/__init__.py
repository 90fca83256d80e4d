"""Any language model as a pooling model: embeddings from causal LMs and encoders, in process or over HTTP."""

from __future__ import annotations

from anypool.adapters.heads import HeadLayer, HeadRecipe, register_head
from anypool.adapters.pooling_model import as_pooling_model
from anypool.config import EngineConfig, LoRARequest, PoolerConfig
from anypool.engine.async_engine import AsyncEngine, ServingOptions
from anypool.entrypoints.llm import LLM
from anypool.errors import AnypoolError
from anypool.kernels.maxsim import maxsim
from anypool.model_executor.registry import (
    ModelRegistry,
    is_pooling_model,
    is_text_generation_model,
    register_model,
)
from anypool.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    MultiTaskOutput,
    MultiTaskRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
    SpanEmbeddingOutput,
    SpanEmbeddingRequestOutput,
    SparseEmbeddingOutput,
    SparseEmbeddingRequestOutput,
    TokenClassificationOutput,
    TokenClassificationRequestOutput,
)
from anypool.pooling.params import PoolingParams
from anypool.pooling.quantize import quantize_embeddings, quantize_token_embeddings
from anypool.pooling.tasks import PoolingTask, encode2pooling_task

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AnypoolError",
    "AsyncEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "HeadLayer",
    "HeadRecipe",
    "LoRARequest",
    "ModelRegistry",
    "MultiTaskOutput",
    "MultiTaskRequestOutput",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingTask",
    "RerankResult",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServingOptions",
    "SpanEmbeddingOutput",
    "SpanEmbeddingRequestOutput",
    "SparseEmbeddingOutput",
    "SparseEmbeddingRequestOutput",
    "TokenClassificationOutput",
    "TokenClassificationRequestOutput",
    "__version__",
    "as_pooling_model",
    "encode2pooling_task",
    "is_pooling_model",
    "is_text_generation_model",
    "maxsim",
    "quantize_embeddings",
    "quantize_token_embeddings",
    "register_head",
    "register_model",
]
