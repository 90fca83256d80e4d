"""Feed-forward blocks and their activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from anypool.errors import CheckpointFormatError
from anypool.model_executor.layers.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]

# "gelu" is the erf form and the others the tanh form: they differ by 1e-3, enough to fail a parity test.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Activation:
    """The activation that config.json calls `name`."""
    if name not in ACTIVATIONS:
        raise CheckpointFormatError(f"config.json: unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up as one product (Shazeer, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.act = activation(act)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        out_TD: torch.Tensor = self.down_proj(self.act(gate) * up)
        return out_TD
