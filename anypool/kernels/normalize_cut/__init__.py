"""Cut to the leading dimensions, then scale to unit length."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.normalize_cut import reference
from anypool.kernels.token_pool import token_pool

__all__ = ["normalize_cut"]


def normalize_cut(rows_NE: torch.Tensor, *, dimensions: int | None = None, normalize: bool) -> torch.Tensor:
    """Keeps the first `dimensions` columns, then divides each row by max(its L2 norm, 1e-12).

    Args:
        rows_NE: `[N, E]` float32.
        dimensions: Columns to keep; None keeps all.
        normalize: Whether rows are scaled.

    Returns:
        `[N, dimensions or E]` float32; a view where rows are not scaled.
    """
    if normalize and uses_triton(rows_NE):
        return token_pool(rows_NE, dimensions=dimensions, finish="normalize")
    return reference.normalize_cut(rows_NE, dimensions=dimensions, normalize=normalize)
