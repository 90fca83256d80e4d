"""Attention over packed sequences: what a layer asks for, and the backends that compute it."""

from __future__ import annotations

from anypool.model_executor.attention.layer import Attention
from anypool.model_executor.attention.metadata import AttentionMetadata
from anypool.model_executor.attention.prefix import PrefixKeys

__all__ = ["Attention", "AttentionMetadata", "PrefixKeys"]
