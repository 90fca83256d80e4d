"""`gated` in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def gated(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """Arguments and result as for the public function."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate_TF) * up_TF
