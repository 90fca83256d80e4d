"""A small classifier over some rows of a packed batch, its calibration and its activation."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.score_head import reference

# By the names of `anypool.config.ACTIVATIONS`.
ACTIVATIONS = reference.ACTIVATIONS
# More labels than this are a matrix product, which torch does well.
MOST_LABELS = 32

__all__ = ["ACTIVATIONS", "MOST_LABELS", "score_head"]


def score_head(
    rows_TD: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    index_N: torch.Tensor | None = None,
    mean: float = 0.0,
    sigma: float = 1.0,
    activation: str = "none",
) -> torch.Tensor:
    """act((W row + b - mean) / sigma) of each row, in float32.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        weight_CD: `[C, D]` float32.
        bias_C: `[C]` float32, or None.
        index_N: `[N]` int64: the rows that are scored; None for all.
        mean, sigma: Calibration of the logits (Platt scaling).
        activation: One of `ACTIVATIONS`; a softmax is over the C labels.

    Returns:
        `[N or T, C]` float32.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    assert rows_TD.shape[1] == weight_CD.shape[1] and weight_CD.dtype == torch.float32
    if not uses_triton(rows_TD) or len(weight_CD) > MOST_LABELS:
        return reference.score_head(
            rows_TD, weight_CD, bias_C, index_N=index_N, mean=mean, sigma=sigma, activation=activation
        )
    from anypool.kernels.score_head import triton

    return triton.score_head(rows_TD, weight_CD, bias_C, index_N, mean=mean, sigma=sigma, activation=activation)
