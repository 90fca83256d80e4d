"""`apply_rotary` in plain torch."""

from __future__ import annotations

import torch


def apply_rotary(x_THK: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Arguments and result as for the public function."""
    size = cos_T1R.shape[-1]
    half = size // 2
    first, second = x_THK[..., :half], x_THK[..., half:size]
    turned = x_THK[..., :size] * cos_T1R
    turned[..., :half].addcmul_(second, sin_T1R[..., :half], value=-1)
    turned[..., half:].addcmul_(first, sin_T1R[..., half:])
    return turned if size == x_THK.shape[-1] else torch.cat([turned, x_THK[..., size:]], dim=-1)
