"""Activation functions by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from anypool.errors import CheckpointFormatError


@dataclass(frozen=True)
class Activation:
    """An activation function.

    Attributes:
        function: Computes it.
        onednn: What oneDNN calls it, so that a product can end with it: an operation and its algorithm.
        kernel: What `kernels.gated` calls it; None where that has it not.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    onednn: tuple[str, str]
    kernel: str | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


_GELU = Activation(F.gelu, ("gelu", "none"), "gelu")
_GELU_TANH = Activation(partial(F.gelu, approximate="tanh"), ("gelu", "tanh"), "gelu_tanh")
_SILU = Activation(F.silu, ("swish", ""), "silu")

# "gelu" is the erf form and the others the tanh form: they differ by 1e-3, enough to fail a parity test.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "silu": _SILU,
    "swish": _SILU,
    "relu": Activation(F.relu, ("relu", ""), "relu"),
    "tanh": Activation(torch.tanh, ("tanh", "")),
}


def activation(name: str) -> Activation:
    """The activation that config.json calls `name`."""
    if name not in ACTIVATIONS:
        raise CheckpointFormatError(f"config.json: unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
