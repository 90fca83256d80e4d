"""Rotary position embeddings, applied."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.rotary import reference

__all__ = ["apply_rotary"]


def apply_rotary(x_THK: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of each head; halves, not neighbours, are paired (Su et al., arXiv:2104.09864).

    Args:
        x_THK: `[T, H, K]` heads.
        cos_T1R: `[T, 1, R]` cosines, R even and at most K; both halves are the same.
        sin_T1R: `[T, 1, R]` sines.

    Returns:
        `[T, H, K]` in memory of its own.
    """
    assert cos_T1R.shape == sin_T1R.shape and cos_T1R.shape[-1] % 2 == 0 and cos_T1R.shape[-1] <= x_THK.shape[-1]
    if not uses_triton(x_THK):
        return reference.apply_rotary(x_THK, cos_T1R, sin_T1R)
    from anypool.kernels.rotary import triton

    return triton.apply_rotary(x_THK, cos_T1R, sin_T1R)
