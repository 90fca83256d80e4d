"""The gate of a feed-forward block."""

from __future__ import annotations

import torch

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.gated import reference

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")

__all__ = ["ACTIVATIONS", "gated"]


def gated(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """act(g) * u, of rows that are g and u side by side (Shazeer, arXiv:2002.05202).

    Args:
        gate_up_TF: `[T, 2 F]`, any float dtype.
        activation: One of `ACTIVATIONS`.

    Returns:
        `[T, F]`. The kernel rounds once; plain torch rounds the activation as well.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    assert gate_up_TF.dim() == 2 and gate_up_TF.shape[1] % 2 == 0
    if not uses_triton(gate_up_TF):
        return reference.gated(gate_up_TF, activation)
    from anypool.kernels.gated import triton

    return triton.gated(gate_up_TF, activation)
