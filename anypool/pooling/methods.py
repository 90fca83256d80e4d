"""Pooling types: hidden states of a packed batch -> one row per sequence.

The formulas are those of sentence-transformers' Pooling module. Rows of a prompt that the recipe leaves out
(`include_prompt=False`) are skipped; WEIGHTED_MEAN keeps the weights of the remaining positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from anypool.kernels.segment_pool import segment_max, segment_rows, segment_sum


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
    """

    lengths: tuple[int, ...]
    skips: tuple[int, ...]
    device: torch.device
    input_ids_T: torch.Tensor | None = None
    pad_token_id: int | None = None

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
    def lengths_N(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @cached_property
    def starts_N(self) -> torch.Tensor:
        return self.lengths_N.cumsum(0) - self.lengths_N

    @cached_property
    def skips_N(self) -> torch.Tensor:
        return torch.tensor(self.skips, dtype=torch.int64, device=self.device)

    @cached_property
    def pooled_lengths_N(self) -> torch.Tensor:
        return self.lengths_N - self.skips_N

    @cached_property
    def positions_T(self) -> torch.Tensor:
        """`[T]` the position of each token in its own sequence."""
        total = sum(self.lengths)
        tokens_T = torch.arange(total, device=self.device)
        return tokens_T - self.starts_N.repeat_interleave(self.lengths_N, output_size=total)

    @cached_property
    def kept_T(self) -> torch.Tensor | None:
        """Indices of the pooled tokens, or None where that is all of them."""
        if not any(self.skips):
            return None
        skips_T = self.skips_N.repeat_interleave(self.lengths_N, output_size=sum(self.lengths))
        return (self.positions_T >= skips_T).nonzero().squeeze(1)

    def kept_rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        return rows_T if self.kept_T is None else rows_T.index_select(0, self.kept_T)


def cls(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The first pooled token."""
    return segment_rows(hidden_TD, segments.starts_N + segments.skips_N)


def last(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The last token."""
    return segment_rows(hidden_TD, segments.starts_N + segments.lengths_N - 1)


def last_not_pad(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The last token whose id is not the padding id; the first where all are."""
    if segments.pad_token_id is None:
        return last(hidden_TD, segments)
    assert segments.input_ids_T is not None
    position_T1 = (segments.positions_T * (segments.input_ids_T != segments.pad_token_id))[:, None]
    offset_N = segment_max(position_T1, segments.lengths_N)[:, 0].to(torch.int64)
    return segment_rows(hidden_TD, segments.starts_N + offset_N)


def mean(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """sum h / n."""
    return _kept_sum(hidden_TD, segments) / segments.pooled_lengths_N[:, None]


def mean_sqrt_len(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """sum h / sqrt(n)."""
    return _kept_sum(hidden_TD, segments) / segments.pooled_lengths_N[:, None].float().sqrt()


def weighted_mean(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """sum (i+1) h_i / sum (i+1), i the position in the sequence (Muennighoff, arXiv:2202.08904)."""
    weights_T1 = (segments.kept_rows(segments.positions_T) + 1).float()[:, None]
    weighted_TD = segments.kept_rows(hidden_TD).float() * weights_T1
    lengths_N = segments.pooled_lengths_N
    return segment_sum(weighted_TD, lengths_N) / segment_sum(weights_T1, lengths_N)


def maximum(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The maximum over tokens, per dimension."""
    return segment_max(segments.kept_rows(hidden_TD), segments.pooled_lengths_N)


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


def _kept_sum(hidden_TD: torch.Tensor, segments: Segments) -> torch.Tensor:
    return segment_sum(segments.kept_rows(hidden_TD), segments.pooled_lengths_N)


_METHODS: dict[PoolingType, Callable[[torch.Tensor, Segments], torch.Tensor]] = {
    PoolingType.CLS: cls,
    PoolingType.LAST: last,
    PoolingType.LAST_NOT_PAD: last_not_pad,
    PoolingType.MEAN: mean,
    PoolingType.MAX: maximum,
    PoolingType.WEIGHTED_MEAN: weighted_mean,
    PoolingType.MEAN_SQRT_LEN: mean_sqrt_len,
}


def pool(hidden_TD: torch.Tensor, segments: Segments, types: tuple[PoolingType, ...]) -> torch.Tensor:
    """Pools each sequence by every type and concatenates the rows in the order given.

    Args:
        hidden_TD: `[T, D]`, any float dtype.
        segments: The sequences; at least one.
        types: Sequence-level types, at least one.

    Returns:
        `[N, D * len(types)]` float32.
    """
    rows = [_METHODS[kind](hidden_TD, segments) for kind in types]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)
