"""Dense vectors of queries and documents that have heads of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from anypool.pooling.methods import PoolingType, Segments
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import ChunkedPooling, EmbedPooler, PooledGroup, Pooler, rows_of


class RoutedEmbedPooler(Pooler):
    """One vector per sequence, by the head of its side.

    Args:
        types: Sequence-level pooling types, concatenated.
        heads: Modules over float32 rows, by the values of a plan's `side`.
    """

    def __init__(self, types: tuple[PoolingType, ...], heads: Mapping[bool | None, nn.Sequential]) -> None:
        super().__init__()
        self.poolers = nn.ModuleDict({str(side): EmbedPooler(types, head) for side, head in heads.items()})

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        pooler = self.poolers[str(plan.side)]
        assert isinstance(pooler, Pooler)
        return pooler.begin(plan, skip=skip, pad_token_id=pad_token_id)

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups: list[PooledGroup] = []
        for side in dict.fromkeys(plan.side for plan in plans):
            indices = [index for index, plan in enumerate(plans) if plan.side == side]
            rows_TD = rows_of(hidden_TD, segments, indices)
            for group in self.poolers[str(side)](rows_TD, segments.subset(indices), [plans[i] for i in indices]):
                groups.append(PooledGroup(tuple(indices[i] for i in group.requests), group.values, group.rows))
        return groups
