"""`rms_norm` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight_K: torch.Tensor, *, eps: float, unit_offset: bool, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows and the sum; arguments as for the public function."""
    if residual is not None:
        x = x + residual
    factor_K = weight_K.float() + 1.0 if unit_offset else weight_K.float()
    return F.rms_norm(x.float(), x.shape[-1:], factor_K, eps).to(x.dtype), x
