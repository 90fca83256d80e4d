"""Root-mean-square normalisation, with the residual that is added before it."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight_K: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual, and s / rms(s) * w, both in the dtype of x (Zhang & Sennrich, arXiv:1910.07467).

    Args:
        x: `[..., K]`, any float dtype.
        weight_K: `[K]` w.
        eps: Added to the mean square.
        unit_offset: Whether the factor is 1 + w, as in Gemma.
        residual: Of the shape and dtype of x; None for none.

    Returns:
        The normalised rows, and s, which is x where there is no residual.
    """
    assert weight_K.shape == x.shape[-1:] and (residual is None or residual.shape == x.shape)
    if not uses_triton(x):
        return reference.rms_norm(x, weight_K, eps=eps, unit_offset=unit_offset, residual=residual)
    from anypool.kernels.rms_norm import triton

    return triton.rms_norm(x, weight_K, eps=eps, unit_offset=unit_offset, residual=residual)
