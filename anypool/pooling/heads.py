"""What follows the pooled row. Heads run in float32 whatever the backbone's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Dense(nn.Module):
    """act(W x + b), plus the input (projected where sizes differ) if the head is residual.

    Args:
        in_features: Size of the input rows.
        out_features: Size of the output rows.
        bias: Whether there is a bias.
        activation: Applied after the product.
        residual: Whether the input is added.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, activation: nn.Module, residual: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = activation
        self.use_residual = residual
        if residual and in_features != out_features:
            self.residual = nn.Linear(in_features, out_features, bias=False)

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        out_NE: torch.Tensor = self.activation(self.linear(rows_NE))
        if not self.use_residual:
            return out_NE
        return out_NE + (rows_NE if self.in_features == self.out_features else self.residual(rows_NE))


class LayerNorm(nn.Module):
    """Layer normalisation with torch's epsilon of 1e-5."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.in_features = self.out_features = dimension
        self.norm = nn.LayerNorm(dimension)

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        out_NE: torch.Tensor = self.norm(rows_NE)
        return out_NE


class Normalize(nn.Module):
    """Scales rows to unit length, in the middle of a chain."""

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        return F.normalize(rows_NE, p=2, dim=-1, eps=1e-12)
