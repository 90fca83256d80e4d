"""`token_pool` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_pool(
    rows_TD: torch.Tensor, *, index_S: torch.Tensor | None, dimensions: int | None, finish: str
) -> torch.Tensor:
    """`[S or T, dimensions or D]` float32; arguments as for the public function."""
    rows_SD = rows_TD[:, :dimensions]
    rows_SD = (rows_SD if index_S is None else rows_SD.index_select(0, index_S)).float()
    if finish == "normalize":
        return F.normalize(rows_SD, p=2, dim=-1, eps=1e-12)
    return rows_SD.softmax(dim=-1) if finish == "softmax" else rows_SD
