"""`score_head` in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda scores: scores,
    "sigmoid": torch.sigmoid,
    "softmax": lambda scores: scores.softmax(dim=-1),
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def score_head(
    rows_TD: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    index_N: torch.Tensor | None,
    mean: float,
    sigma: float,
    activation: str,
) -> torch.Tensor:
    """`[N or T, C]` float32; arguments as for the public function."""
    rows_ND = (rows_TD if index_N is None else rows_TD.index_select(0, index_N)).float()
    logits_NC = F.linear(rows_ND, weight_CD, bias_C)
    if mean != 0.0 or sigma != 1.0:
        logits_NC = (logits_NC - mean) / sigma
    return ACTIVATIONS[activation](logits_NC)
