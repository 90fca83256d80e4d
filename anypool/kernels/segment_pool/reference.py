"""Segment reductions in plain torch.

Each segment is reduced on its own and in float32: a running sum over the whole batch would be cheaper, but then a
sequence's mean would depend on what is packed before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def segment_pool(
    rows_TD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    method: str,
    *,
    skips_N: torch.Tensor | None = None,
    dimensions: int | None = None,
) -> torch.Tensor:
    """`[N, dimensions or D]` float32; arguments as for the public function."""
    rows_TD = rows_TD[:, :dimensions]
    ends_N, full_N = cu_seqlens[1:].long(), cu_seqlens.diff().long()
    lengths_N = full_N if skips_N is None else (full_N - skips_N).clamp(min=0)
    if len(rows_TD) == 0:
        return rows_TD.new_zeros(len(full_N), rows_TD.shape[1], dtype=torch.float32)
    if method in ("CLS", "LAST"):
        index_N = ends_N - lengths_N if method == "CLS" else ends_N - 1
        return _zero_where_empty(segment_rows(rows_TD, index_N.clamp(0, len(rows_TD) - 1)), lengths_N)
    if skips_N is not None:
        starts_T = (ends_N - lengths_N).repeat_interleave(full_N, output_size=len(rows_TD))
        rows_TD = rows_TD[torch.arange(len(rows_TD), device=rows_TD.device) >= starts_T]
    if method == "MAX":
        return _zero_where_empty(segment_max(rows_TD, lengths_N), lengths_N)
    if method == "WEIGHTED_MEAN":
        weights_T1 = _weights(full_N, lengths_N, len(rows_TD))[:, None]
        return _over(segment_sum(rows_TD.float() * weights_T1, lengths_N), segment_sum(weights_T1, lengths_N))
    sums_ND = segment_sum(rows_TD, lengths_N)
    return _over(sums_ND, lengths_N[:, None] if method == "MEAN" else lengths_N[:, None].float().sqrt())


def normalized(rows_NE: torch.Tensor) -> torch.Tensor:
    """Rows divided by max(their L2 norm, 1e-12)."""
    return F.normalize(rows_NE, p=2, dim=-1, eps=1e-12)


def segment_sum(rows_TD: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """Sums consecutive rows.

    Args:
        rows_TD: `[T, D]`, any float dtype.
        lengths_N: `[N]` int64, rows per segment; they sum to T.

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


def _weights(full_N: torch.Tensor, lengths_N: torch.Tensor, total: int) -> torch.Tensor:
    """`[kept T]` positions of the kept rows in their sequences, counted from 1."""
    before_N = lengths_N.cumsum(0) - lengths_N  # kept rows of the sequences before
    offsets_T = (full_N - lengths_N + 1 - before_N).repeat_interleave(lengths_N, output_size=total)
    return (torch.arange(total, device=full_N.device) + offsets_T).float()


def _over(sums_ND: torch.Tensor, divisors_N1: torch.Tensor) -> torch.Tensor:
    return sums_ND / torch.where(divisors_N1 == 0, 1, divisors_N1)


def _zero_where_empty(rows_ND: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    return torch.where((lengths_N > 0)[:, None], rows_ND, 0.0)
