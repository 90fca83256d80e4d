"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) * w in float32 (Zhang & Sennrich, arXiv:1910.07467).

    Args:
        size: Size of the last dimension.
        eps: Added to the mean square.
        unit_offset: Whether the factor is 1 + w, as in Gemma, instead of w.
    """

    def __init__(self, size: int, *, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        if self.unit_offset:
            return (y * (1.0 + self.weight.float())).to(x.dtype)
        # The order of the cast is Llama's: a bf16 weight multiplies the bf16 row.
        return self.weight * y.to(x.dtype)


class LayerNorm(nn.Module):
    """Layer normalisation with a weight and, mostly, a bias."""

    def __init__(self, size: int, *, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
