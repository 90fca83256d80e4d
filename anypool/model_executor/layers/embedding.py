"""Lookup tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """Rows of a table.

    Args:
        rows: Vocabulary size.
        size: Size of a row.
    """

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, self.weight)
