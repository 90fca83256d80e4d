"""Lookup tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from anypool.model_executor.layers.lora import EmbeddingLoRA


class Embedding(nn.Module):
    """Rows of a table.

    Args:
        rows: Vocabulary size.
        size: Size of a row.

    Attributes:
        lora: What low-rank adapters do to the rows; None where none has anything for this table.
    """

    lora: EmbeddingLoRA | None = None

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        y = F.embedding(ids_T, self.weight)
        return self.lora.apply(y, ids_T) if self.lora is not None and self.lora.is_active else y
