"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * w, computed in float32 (Zhang & Sennrich, arXiv:1910.07467).

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
        if x.device.type != "cpu" or uses_triton(x):
            return rms_norm(x, self.weight, eps=self.eps, unit_offset=self.unit_offset)[0]
        weight = self.weight.float() + 1.0 if self.unit_offset else self.weight.float()
        # On a CPU torch's own is seven passes over the rows; these are five, or three in float32.
        y = x.float()
        inverse = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        y = y * inverse if y is x else y.mul_(inverse)
        return y.mul_(weight).to(x.dtype)

    def after_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum: one pass on a GPU."""
        return rms_norm(x, self.weight, eps=self.eps, unit_offset=self.unit_offset, residual=residual)


class LayerNorm(nn.Module):
    """Layer normalisation with a weight and, mostly, a bias."""

    def __init__(self, size: int, *, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
