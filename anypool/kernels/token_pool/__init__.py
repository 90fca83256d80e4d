"""Rows of a packed batch that are kept, each finished by itself: one result per token."""

from __future__ import annotations

from typing import Literal

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.token_pool import reference

Finish = Literal["none", "normalize", "softmax"]
FINISHES: tuple[Finish, ...] = ("none", "normalize", "softmax")
# Columns of the widest row that one program of the kernel holds.
_WIDEST = 65536

__all__ = ["FINISHES", "Finish", "token_pool"]


def token_pool(
    rows_TD: torch.Tensor,
    *,
    index_S: torch.Tensor | None = None,
    dimensions: int | None = None,
    finish: Finish = "none",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gathers rows, cuts them, normalises them or takes their softmax, and casts. Computed in float32.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        index_S: `[S]` int64: the rows that are kept, such as those behind a prompt or of a step tag; None for all.
        dimensions: Columns that are kept; None keeps all.
        finish: "normalize" divides each row by max(its L2 norm, 1e-12).
        dtype: Of the result.

    Returns:
        `[S or T, dimensions or D]`.
    """
    if finish not in FINISHES:
        raise ValueError(f"unknown finish {finish!r}; known: {', '.join(FINISHES)}")
    assert rows_TD.dim() == 2 and (index_S is None or index_S.dim() == 1)
    assert dimensions is None or 1 <= dimensions <= rows_TD.shape[1]
    if not uses_triton(rows_TD) or rows_TD.shape[1] > _WIDEST:
        return reference.token_pool(rows_TD, index_S=index_S, dimensions=dimensions, finish=finish).to(dtype)
    from anypool.kernels.token_pool import triton

    kept = rows_TD.shape[1] if dimensions is None else dimensions
    return triton.token_pool(rows_TD, index_S, dimensions=kept, finish=finish, dtype=dtype)
