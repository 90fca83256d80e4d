"""Pooling types: hidden states of a packed batch -> one row per sequence.

The formulas are those of sentence-transformers' Pooling module, and stand in `kernels/segment_pool`. Rows of a prompt
that the recipe leaves out (`include_prompt=False`) are skipped; WEIGHTED_MEAN (Muennighoff, arXiv:2202.08904) keeps
the weights of the remaining positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

import torch

from anypool.kernels.segment_pool import METHODS, Method, segment_pool
from anypool.kernels.token_pool import token_pool


class PoolingType(str, Enum):
    """How hidden states become rows. ALL keeps one row per token, STEP those of one token id.

    LAST_NOT_PAD is the rule of transformers' sequence classification: the last token whose *id* is not the padding
    id, which is another token than LAST where a text ends in that id.
    """

    CLS = "CLS"
    LAST = "LAST"
    MEAN = "MEAN"
    MAX = "MAX"
    WEIGHTED_MEAN = "WEIGHTED_MEAN"
    MEAN_SQRT_LEN = "MEAN_SQRT_LEN"
    LAST_NOT_PAD = "LAST_NOT_PAD"
    ALL = "ALL"
    STEP = "STEP"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed batch lie, and which of their rows are pooled.

    Attributes:
        lengths: Tokens per sequence, each at least 1.
        skips: Leading tokens per sequence that are left out of pooling, each less than its length.
        device: Where index tensors are made.
        input_ids_T: `[T]` the packed token ids, for the types that look at them.
        pad_token_id: What LAST_NOT_PAD passes over; None for nothing.
        bounds_N1, skipped_N: `cu_seqlens` and `skips_N`, where they are on the device already. In a CUDA graph they
            are all there is: `lengths` and `skips` are empty.
    """

    lengths: tuple[int, ...]
    skips: tuple[int, ...]
    device: torch.device
    input_ids_T: torch.Tensor | None = None
    pad_token_id: int | None = None
    bounds_N1: torch.Tensor | None = None
    skipped_N: torch.Tensor | None = None

    def subset(self, indices: Sequence[int]) -> Segments:
        """Some of the sequences, in the order given."""
        ids_T = self.input_ids_T
        if ids_T is not None:
            sequences = ids_T.split(self.lengths)
            ids_T = torch.cat([sequences[i] for i in indices])
        return Segments(
            tuple(self.lengths[i] for i in indices),
            tuple(self.skips[i] for i in indices),
            self.device,
            ids_T,
            self.pad_token_id,
        )

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """`[N+1]` int32: sequence i is rows `cu_seqlens[i]:cu_seqlens[i+1]`."""
        if self.bounds_N1 is not None:
            return self.bounds_N1
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def skips_N(self) -> torch.Tensor | None:
        """`[N]` int32 `skips`, or None where nothing is skipped."""
        if self.skipped_N is not None:
            return self.skipped_N
        return torch.tensor(self.skips, dtype=torch.int32, device=self.device) if any(self.skips) else None


def row_of(kind: PoolingType, segments: Segments) -> torch.Tensor | None:
    """`[N]` int64: the one row of the batch that is a sequence's result, or None for a type that reduces rows."""
    starts_N, ends_N = segments.cu_seqlens[:-1].long(), segments.cu_seqlens[1:].long()
    match kind:
        case PoolingType.CLS:
            return starts_N if segments.skips_N is None else starts_N + segments.skips_N
        case PoolingType.LAST:
            return ends_N - 1  # whatever is skipped, which is never all
        case PoolingType.LAST_NOT_PAD:
            return ends_N - 1 if segments.pad_token_id is None else _last_not_pad(starts_N, segments)
    return None


def _last_not_pad(starts_N: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The last token whose id is not the padding id; the first where all are."""
    ids_T = segments.input_ids_T
    assert ids_T is not None and segments.pad_token_id is not None
    place_T = torch.arange(len(ids_T), device=ids_T.device)
    place_T = place_T.masked_fill(ids_T.eq(segments.pad_token_id), -1)
    last_N = segment_pool(place_T.float()[:, None], segments.cu_seqlens, "MAX")[:, 0].long()
    return torch.maximum(last_N, starts_N)


def span_means(rows_LD: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The mean of each span of one sequence's rows: late chunking (Günther et al., arXiv:2409.04701).

    Args:
        rows_LD: `[L, D]`, any float dtype.
        spans: First row and the one after the last, of each span; they may overlap.

    Returns:
        `[spans, D]` float32.
    """
    spans_S2 = torch.tensor(spans, dtype=torch.int64, device=rows_LD.device)
    return (span_sums(rows_LD, spans_S2) / spans_S2.diff()).float()


def span_sums(rows_LD: torch.Tensor, spans_S2: torch.Tensor) -> torch.Tensor:
    """The sum of each span of rows, as a difference of running sums: float64 for the digits that this loses.

    Args:
        rows_LD: `[L, D]`, any float dtype.
        spans_S2: `[spans, 2]` int64: first row and the one after the last, the same where a span is empty.

    Returns:
        `[spans, D]` float64.
    """
    sums_LD = torch.nn.functional.pad(rows_LD.double().cumsum(dim=0), (0, 0, 1, 0))
    starts_S, ends_S = spans_S2.unbind(dim=1)
    return sums_LD[ends_S] - sums_LD[starts_S]


def pool(hidden_TD: torch.Tensor, segments: Segments, types: tuple[PoolingType, ...]) -> torch.Tensor:
    """Pools each sequence by every type and concatenates the rows in the order given.

    Args:
        hidden_TD: `[T, D]`, any float dtype.
        segments: The sequences; at least one.
        types: Sequence-level types, at least one.

    Returns:
        `[N, D * len(types)]` float32.
    """
    rows = [_pool(hidden_TD, segments, kind) for kind in types]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


def _pool(hidden_TD: torch.Tensor, segments: Segments, kind: PoolingType) -> torch.Tensor:
    if kind is PoolingType.LAST_NOT_PAD:
        index_N = row_of(kind, segments)
        assert index_N is not None
        return token_pool(hidden_TD, index_S=index_N)
    return segment_pool(hidden_TD, segments.cu_seqlens, method_of(kind), skips_N=segments.skips_N)


def method_of(kind: PoolingType) -> Method:
    """What the kernel calls a sequence-level type that looks at no token ids."""
    assert kind.value in METHODS, f"{kind} gives no row per sequence, or looks at token ids"
    return kind.value
