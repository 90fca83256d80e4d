"""Reductions of packed rows to one row per sequence: `hidden_TD`, `cu_seqlens` -> `pooled_ND`, in float32."""

from __future__ import annotations

from anypool.kernels.segment_pool.reference import (
    segment_max,
    segment_rows,
    segment_sum,
)

__all__ = ["segment_max", "segment_rows", "segment_sum"]
