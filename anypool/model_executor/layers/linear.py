"""The linear layer: one product, possibly of several parts that checkpoints store apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b.

    A fused layer stacks several checkpoint tensors along the output: `parts` maps each part's name in the checkpoint
    to its output size, in order, so that loading, LoRA and splitting agree on them. The part stands beside the layer:
    a layer `self_attn.qkv_proj` with the part `q_proj` reads `self_attn.q_proj.weight`.

    Args:
        in_features: Size of the input.
        out_features: Size of the output, or the parts.
        bias: Whether there is a bias.
    """

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts: dict[str, int] = dict(out_features) if isinstance(out_features, Mapping) else {}
        self.in_features = in_features
        self.out_features = sum(self.parts.values()) if isinstance(out_features, Mapping) else out_features
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        parts = f", parts={self.parts}" if self.parts else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{parts}"
