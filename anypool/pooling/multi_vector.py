"""The pooler of multi-vector models: a projected vector for each token that is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anypool.kernels.normalize_cut import normalize_cut
from anypool.kernels.token_pool import token_pool
from anypool.pooling.methods import Segments
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import ChunkedPooling, PooledGroup, Pooler, RowByRow, by_plan, rows_of
from anypool.pooling.token_pooling import pool_tokens


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """Which tokens of a text have a vector.

    Attributes:
        dropped: Ids that have none, such as those of punctuation.
        only: The ids that have one; None for all others.
    """

    dropped: Collection[int] = ()
    only: Collection[int] | None = None

    def keeps_any(self, ids: Sequence[int]) -> bool:
        """Whether a text with these ids has a vector at all."""
        return any(map(self.keeps, ids))

    def keeps(self, one: int) -> bool:
        """Whether tokens of this id have a vector."""
        return one not in self.dropped and (self.only is None or one in self.only)

    def mask(self, ids_T: torch.Tensor) -> torch.Tensor | None:
        """`[T]` bool, true where a token has a vector; None where all have."""
        if not self.dropped and self.only is None:
            return None
        keep_T = torch.ones_like(ids_T, dtype=torch.bool)
        if self.dropped:
            keep_T &= ~torch.isin(ids_T, torch.tensor(sorted(self.dropped), device=ids_T.device))
        if self.only is not None:
            keep_T &= torch.isin(ids_T, torch.tensor(sorted(self.only), device=ids_T.device))
        return keep_T


class MultiVectorPooler(Pooler):
    """Kept tokens, head modules in order, cut, normalise; of documents clusters of tokens where the plan says so.

    Args:
        head: Modules over float32 rows; may be empty.
        queries, documents: Which tokens of either have a vector.
    """

    def __init__(self, head: nn.Module, *, queries: KeptTokens, documents: KeptTokens) -> None:
        super().__init__()
        self.head, self.queries, self.documents = head, queries, documents

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = []
        for plan, indices in by_plan(plans).items():
            rows_TD = rows_of(hidden_TD, segments, indices)
            counts = tuple(segments.lengths[i] for i in indices)
            assert segments.input_ids_T is not None
            kept = self.queries if plan.is_query else self.documents
            keep_T, index_S = kept.mask(rows_of(segments.input_ids_T, segments, indices)), None
            if keep_T is not None:  # before the head, so that it runs on the kept rows only
                index_S = keep_T.nonzero().squeeze(1)
                counts = tuple(int(part.sum()) for part in keep_T.cpu().split(counts))
            rows_SE = self.head(token_pool(rows_TD, index_S=index_S))
            values = normalize_cut(rows_SE, dimensions=plan.dimensions, normalize=plan.normalize)
            if plan.token_pooling is not None:
                pooled = [pool_tokens(rows, plan.token_pooling) for rows in values.split(counts)]
                values, counts = torch.cat(pooled), tuple(map(len, pooled))
            groups.append(PooledGroup(indices, values, counts))
        return groups

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        if plan.token_pooling is not None:  # which clusters the vectors of a whole text
            return super().begin(plan, skip=skip, pad_token_id=pad_token_id)
        return RowByRow(self, plan)
