"""Segment reductions in plain torch.

Each segment is reduced on its own and in float32: a running sum over the whole batch would be cheaper, but then a
sequence's mean would depend on what is packed before it.
"""

from __future__ import annotations

import torch


def segment_sum(rows_TD: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """Sums consecutive rows.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        lengths_N: `[N]` int64, rows per segment, each at least 1; they sum to T.

    Returns:
        `[N, D]` float32.
    """
    return torch.segment_reduce(rows_TD.float(), "sum", lengths=lengths_N, axis=0, unsafe=True)


def segment_max(rows_TD: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """The maximum of consecutive rows, per column. Arguments and result as for `segment_sum`."""
    return torch.segment_reduce(rows_TD.float(), "max", lengths=lengths_N, axis=0, unsafe=True)


def segment_rows(rows_TD: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """Gathers one row per segment.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        index_N: `[N]` int64, positions in the packed batch.

    Returns:
        `[N, D]` float32.
    """
    return rows_TD.index_select(0, index_N).float()
