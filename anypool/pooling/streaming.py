"""Pooling types folded over the chunks of one text, with the results of the batched forms in `methods`.

A chunked prefill sees a text's hidden states a piece at a time. Each state here takes the pieces in order and keeps
no more than its result needs: one row, or for ALL and STEP the rows that are returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from anypool.pooling.methods import PoolingType, span_sums


class PoolingState(ABC):
    """One pooling type over one text.

    Args:
        skip: Leading tokens that are not pooled.
    """

    def __init__(self, *, skip: int = 0) -> None:
        self.skip = skip
        self.seen = 0

    def update(self, rows_LD: torch.Tensor, ids_L: torch.Tensor) -> None:
        """Takes the next piece.

        Args:
            rows_LD: `[L, D]` hidden states, any float dtype; L may be 0.
            ids_L: `[L]` their token ids.
        """
        start, self.seen = self.seen, self.seen + len(rows_LD)
        skipped = max(0, min(len(rows_LD), self.skip - start))
        if skipped < len(rows_LD):
            self.fold(rows_LD[skipped:], ids_L[skipped:], start + skipped)

    @abstractmethod
    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        """Takes pooled rows, at least one, the first of them at position `start` of the text."""

    @abstractmethod
    def result(self) -> torch.Tensor:
        """`[D]` float32, or `[rows, D]` for ALL and STEP."""


class FirstRow(PoolingState):
    """CLS."""

    row_D: torch.Tensor | None = None

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        if self.row_D is None:
            self.row_D = _copy(rows_LD[0])

    def result(self) -> torch.Tensor:
        return _there(self.row_D)


class LastRow(PoolingState):
    """LAST, and LAST_NOT_PAD where a padding id is given."""

    def __init__(self, *, skip: int = 0, pad_token_id: int | None = None) -> None:
        super().__init__(skip=skip)
        self.pad_token_id = pad_token_id
        self.row_D: torch.Tensor | None = None

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        if self.pad_token_id is None:
            self.row_D = _copy(rows_LD[-1])
            return
        kept = (ids_L != self.pad_token_id).nonzero()
        if len(kept):
            self.row_D = _copy(rows_LD[int(kept[-1])])
        elif self.row_D is None:
            self.row_D = _copy(rows_LD[0])

    def result(self) -> torch.Tensor:
        return _there(self.row_D)


class RunningSum(PoolingState):
    """MEAN, MEAN_SQRT_LEN and WEIGHTED_MEAN: a weighted sum, and what it is divided by in the end.

    Args:
        weighted: Whether a row's weight is its position counted from 1, rather than 1.
        divisor: Sum of weights -> what the sum of rows is divided by.
    """

    def __init__(
        self, *, skip: int = 0, weighted: bool = False, divisor: Callable[[float], float] = lambda total: total
    ) -> None:
        super().__init__(skip=skip)
        self.weighted, self.divisor = weighted, divisor
        self.sum_D: torch.Tensor | None = None
        self.weight = 0.0

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        rows_LD = rows_LD.float()
        weight = float(len(rows_LD))
        if self.weighted:
            weights_L1 = torch.arange(start + 1, start + 1 + len(rows_LD), device=rows_LD.device).float()[:, None]
            rows_LD, weight = rows_LD * weights_L1, float(weights_L1.sum())
        piece_D = rows_LD.sum(dim=0)
        self.sum_D = piece_D if self.sum_D is None else self.sum_D + piece_D
        self.weight += weight

    def result(self) -> torch.Tensor:
        return _there(self.sum_D) / self.divisor(self.weight)


class RunningMax(PoolingState):
    """MAX."""

    max_D: torch.Tensor | None = None

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        piece_D = rows_LD.float().amax(dim=0)
        self.max_D = piece_D if self.max_D is None else torch.maximum(self.max_D, piece_D)

    def result(self) -> torch.Tensor:
        return _there(self.max_D)


class SpanMeans(PoolingState):
    """The means of spans of the text, `[spans, D]`, as `methods.span_means` has them.

    Args:
        spans: First token and the one after the last, of each.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.spans_S2 = torch.tensor(spans, dtype=torch.int64)
        self.sums_SD: torch.Tensor | None = None

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        here_S2 = (self.spans_S2 - start).clamp(0, len(rows_LD)).to(rows_LD.device)
        piece_SD = span_sums(rows_LD, here_S2)
        self.sums_SD = piece_SD if self.sums_SD is None else self.sums_SD + piece_SD

    def result(self) -> torch.Tensor:
        sums_SD = _there(self.sums_SD)
        return (sums_SD / self.spans_S2.diff().to(sums_SD.device)).float()


class KeptRows(PoolingState):
    """ALL, and STEP where a tag is given."""

    def __init__(self, *, step_tag_id: int | None = None) -> None:
        super().__init__()
        self.step_tag_id = step_tag_id
        self.pieces: list[torch.Tensor] = []

    def fold(self, rows_LD: torch.Tensor, ids_L: torch.Tensor, start: int) -> None:
        self.pieces.append(_copy(rows_LD if self.step_tag_id is None else rows_LD[ids_L == self.step_tag_id]))

    def result(self) -> torch.Tensor:
        assert self.pieces, "no rows were seen"
        return torch.cat(self.pieces)


def pooling_state(
    kind: PoolingType, *, skip: int = 0, pad_token_id: int | None = None, step_tag_id: int | None = None
) -> PoolingState:
    """A fresh state of a pooling type, for one text.

    Args:
        kind: The type.
        skip: Leading tokens that are not pooled, for sequence-level types.
        pad_token_id: What LAST_NOT_PAD passes over.
        step_tag_id: What STEP keeps.
    """
    match kind:
        case PoolingType.CLS:
            return FirstRow(skip=skip)
        case PoolingType.LAST:
            return LastRow()  # the last token is pooled whatever is skipped
        case PoolingType.LAST_NOT_PAD:
            return LastRow(pad_token_id=pad_token_id)
        case PoolingType.MEAN:
            return RunningSum(skip=skip)
        case PoolingType.MEAN_SQRT_LEN:
            return RunningSum(skip=skip, divisor=lambda total: total**0.5)
        case PoolingType.WEIGHTED_MEAN:
            return RunningSum(skip=skip, weighted=True)
        case PoolingType.MAX:
            return RunningMax(skip=skip)
        case PoolingType.ALL:
            return KeptRows()
        case PoolingType.STEP:
            assert step_tag_id is not None
            return KeptRows(step_tag_id=step_tag_id)


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """In float32 and in memory of its own: a piece may be overwritten by the next, and is not to be kept alive."""
    return rows.to(torch.float32, copy=True)


def _there(row_D: torch.Tensor | None) -> torch.Tensor:
    assert row_D is not None, "no rows were pooled"
    return row_D
