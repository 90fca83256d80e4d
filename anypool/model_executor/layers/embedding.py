"""Lookup tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from anypool.model_executor.distributed import sum_over_ranks
from anypool.model_executor.layers.split import vocabulary_share

if TYPE_CHECKING:
    from anypool.model_executor.layers.lora import EmbeddingLoRA


class Embedding(nn.Module):
    """Rows of a table.

    Args:
        rows: Vocabulary size.
        size: Size of a row.
        split: Whether processes that hold a model together have a part of the rows each.

    Attributes:
        lora: What low-rank adapters do to the rows; None where none has anything for this table.
    """

    lora: EmbeddingLoRA | None = None

    def __init__(self, rows: int, size: int, *, split: bool = False) -> None:
        super().__init__()
        self.num_rows = rows
        self.rows = vocabulary_share(rows) if split else range(rows)
        self.split = len(self.rows) < rows
        self.weight = nn.Parameter(torch.empty(len(self.rows), size), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        y = sum_over_ranks(self._own_rows(ids_T)) if self.split else F.embedding(ids_T, self.weight)
        return self.lora.apply(y, ids_T) if self.lora is not None and self.lora.is_active else y

    def _own_rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows that this process has, and zeros for the others."""
        if not self.rows:
            return self.weight.new_zeros(*ids_T.shape, self.weight.shape[1])
        own_T = ids_T - self.rows.start
        is_elsewhere_T = (own_T < 0) | (own_T >= len(self.rows))
        found_TD = F.embedding(own_T.masked_fill(is_elsewhere_T, 0), self.weight)
        return found_TD.masked_fill_(is_elsewhere_T.unsqueeze(-1), 0)

    def table(self) -> torch.Tensor:
        """`[rows, size]` all rows, which every process asks for at the same time: a copy where they are split."""
        if not self.split:
            return self.weight
        whole_VD = self.weight.new_zeros(self.num_rows, self.weight.shape[1])
        whole_VD[self.rows.start : self.rows.stop] = self.weight
        return sum_over_ranks(whole_VD)
