"""Attention within the sequences of a packed batch."""

from __future__ import annotations

from anypool.kernels.varlen_attention.reference import varlen_attention

__all__ = ["varlen_attention"]
