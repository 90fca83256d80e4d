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

    @property
    def is_plain_product(self) -> bool:
        """Whether it is W x + b and no more."""
        return isinstance(self.activation, nn.Identity) and not self.use_residual

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        out_NE: torch.Tensor = self.activation(self.linear(rows_NE))
        if not self.use_residual:
            return out_NE
        return out_NE + (rows_NE if self.in_features == self.out_features else self.residual(rows_NE))


class LMHeadRows(nn.Module):
    """Logits of a few tokens, from their rows of the LM head.

    Args:
        in_features: Hidden size.
        out_features: How many tokens.
        bias: Whether the LM head has a bias.
        scale: What the model multiplies its logits with.
        softcap: c in c tanh(logit / c), or None.
        difference: For two tokens [false, true]: one score, true minus false, whose sigmoid is the softmax of the two.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
        difference: bool = False,
    ) -> None:
        super().__init__()
        assert not difference or out_features == 2
        self.in_features, self.out_features = in_features, 1 if difference else out_features
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.scale, self.softcap, self.difference = scale, softcap, difference

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        logits_NC: torch.Tensor = self.linear(rows_NE) * self.scale
        if self.softcap is not None:
            logits_NC = self.softcap * torch.tanh(logits_NC / self.softcap)
        return logits_NC[:, 1:] - logits_NC[:, :1] if self.difference else logits_NC


class LayerNorm(nn.Module):
    """Layer normalisation, with torch's epsilon of 1e-5 where a recipe names none."""

    def __init__(self, dimension: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.in_features = self.out_features = dimension
        self.norm = nn.LayerNorm(dimension, eps=eps, bias=bias)

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        out_NE: torch.Tensor = self.norm(rows_NE)
        return out_NE


class Normalize(nn.Module):
    """Scales rows to unit length, in the middle of a chain."""

    def forward(self, rows_NE: torch.Tensor) -> torch.Tensor:
        return F.normalize(rows_NE, p=2, dim=-1, eps=1e-12)
