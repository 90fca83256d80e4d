"""Feed-forward blocks."""

from __future__ import annotations

import torch
from torch import nn

from anypool.model_executor.layers.activation import activation
from anypool.model_executor.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            act=activation(act),
            split="column",
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, split="row")

    def forward(self, x_TD: torch.Tensor, *, add: torch.Tensor | None = None) -> torch.Tensor:
        out_TD: torch.Tensor = self.down_proj(self.gate_up_proj(x_TD), add=add)
        return out_TD
