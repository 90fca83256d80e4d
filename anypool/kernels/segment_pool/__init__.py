"""Reductions of packed rows to one row per sequence: `hidden_TD`, `cu_seqlens` -> `pooled_ND`."""

from __future__ import annotations

from typing import Literal

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.segment_pool import reference

Method = Literal["CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN"]
METHODS: tuple[Method, ...] = ("CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN")

segment_max = reference.segment_max
segment_rows = reference.segment_rows
segment_sum = reference.segment_sum

__all__ = ["METHODS", "Method", "segment_max", "segment_pool", "segment_rows", "segment_sum"]


def segment_pool(
    rows_TD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    method: Method,
    *,
    skips_N: torch.Tensor | None = None,
    dimensions: int | None = None,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Pools each sequence, cuts, normalises and casts. Sums are made in float32.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        cu_seqlens: `[N+1]` int32: sequence i is rows `cu_seqlens[i]:cu_seqlens[i+1]`.
        method: CLS is the first pooled row, LAST the last; MEAN is sum h / n, MEAN_SQRT_LEN sum h / sqrt(n) and
            WEIGHTED_MEAN sum (i+1) h_i / sum (i+1), i the position in the sequence, skipped rows counted.
        skips_N: `[N]` int32: leading rows of each sequence that are not pooled; None for none.
        dimensions: Columns that are kept; None keeps all.
        normalize: Whether each row is divided by max(its L2 norm, 1e-12), after the cut.
        dtype: Of the result.

    Returns:
        `[N, dimensions or D]`. A sequence with no row to pool gives zeros.
    """
    if method not in METHODS:
        raise ValueError(f"unknown pooling method {method!r}; known: {', '.join(METHODS)}")
    assert rows_TD.dim() == 2 and cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32
    assert skips_N is None or (skips_N.dtype == torch.int32 and len(skips_N) == len(cu_seqlens) - 1)
    assert dimensions is None or 1 <= dimensions <= rows_TD.shape[1]
    if not uses_triton(rows_TD):
        pooled_ND = reference.segment_pool(rows_TD, cu_seqlens, method, skips_N=skips_N, dimensions=dimensions)
        return reference.normalized(pooled_ND).to(dtype) if normalize else pooled_ND.to(dtype)
    from anypool.kernels.segment_pool import triton

    return triton.segment_pool(
        rows_TD,
        cu_seqlens,
        method,
        skips_N=skips_N,
        dimensions=rows_TD.shape[1] if dimensions is None else dimensions,
        normalize=normalize,
        dtype=dtype,
    )
