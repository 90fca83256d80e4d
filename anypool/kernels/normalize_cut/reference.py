"""`normalize_cut` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def normalize_cut(rows_NE: torch.Tensor, *, dimensions: int | None = None, normalize: bool) -> torch.Tensor:
    """Keeps the first `dimensions` columns, then divides each row by max(its L2 norm, 1e-12).

    The cut comes first, so that a shortened Matryoshka vector has unit length (Kusupati et al., 2022).

    Args:
        rows_NE: `[N, E]` float32.
        dimensions: Columns to keep; None keeps all.
        normalize: Whether rows are scaled.

    Returns:
        `[N, dimensions or E]` float32.
    """
    if dimensions is not None:
        rows_NE = rows_NE[:, :dimensions]
    return F.normalize(rows_NE, p=2, dim=-1, eps=1e-12) if normalize else rows_NE
