"""A pooler is pooling type + head for one task; a model's `DispatchPooler` holds one per task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from anypool.kernels.normalize_cut import normalize_cut
from anypool.pooling.methods import PoolingType, Segments, pool
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask


@dataclass(frozen=True)
class PooledGroup:
    """Results of the requests of a batch that share one plan.

    Attributes:
        requests: Their places in the batch.
        values: `[rows, E]` float32: one row per request, or `rows[i]` rows for the i-th.
        rows: Rows per request for token-level results; None where it is one each.
    """

    requests: tuple[int, ...]
    values: torch.Tensor
    rows: tuple[int, ...] | None = None


class Pooler(nn.Module, ABC):
    """Hidden states of the requests of one task -> their results."""

    @abstractmethod
    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        """Pools every sequence of the batch.

        Args:
            hidden_TD: `[T, D]` hidden states after the backbone's final norm, any float dtype.
            segments: The sequences.
            plans: One per sequence.

        Returns:
            Groups that cover each sequence once.
        """


class EmbedPooler(Pooler):
    """One vector per sequence: pooling types, head modules in order, cut, normalise.

    Args:
        types: Sequence-level pooling types, concatenated.
        head: Modules over float32 rows; may be empty.
    """

    def __init__(self, types: tuple[PoolingType, ...], head: nn.Sequential | None = None) -> None:
        super().__init__()
        assert types and PoolingType.ALL not in types
        self.types = types
        self.head = head if head is not None else nn.Sequential()

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        rows_NE = self.head(pool(hidden_TD, segments, self.types))
        return [
            PooledGroup(
                indices,
                normalize_cut(_take(rows_NE, indices), dimensions=plan.dimensions, normalize=plan.normalize),
            )
            for plan, indices in _by_plan(plans).items()
        ]


class TokenEmbedPooler(Pooler):
    """One vector per token: the hidden states, normalised where the plan says so."""

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        sequences = hidden_TD.split(segments.lengths)
        groups = []
        for plan, indices in _by_plan(plans).items():
            chosen = hidden_TD if len(indices) == len(plans) else torch.cat([sequences[i] for i in indices])
            values = normalize_cut(chosen.float(), dimensions=None, normalize=plan.normalize)
            groups.append(PooledGroup(indices, values, tuple(segments.lengths[i] for i in indices)))
        return groups


class DispatchPooler(Pooler):
    """Sends each sequence of a batch to the pooler of its task.

    Args:
        poolers: One pooler per task that the model serves.
    """

    def __init__(self, poolers: Mapping[PoolingTask, Pooler]) -> None:
        super().__init__()
        self.poolers = nn.ModuleDict({task.value: pooler for task, pooler in poolers.items()})

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        return tuple(PoolingTask(name) for name in self.poolers)

    def install(self, task: PoolingTask, pooler: Pooler) -> None:
        """Serves a task with another pooler from now on."""
        self.poolers[task.value] = pooler

    def __getitem__(self, task: PoolingTask) -> Pooler:
        return cast(Pooler, self.poolers[task.value])

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        by_task: dict[PoolingTask, list[int]] = {}
        for index, plan in enumerate(plans):
            by_task.setdefault(plan.task, []).append(index)
        if len(by_task) == 1:
            return cast(list[PooledGroup], self[plans[0].task](hidden_TD, segments, plans))
        sequences = hidden_TD.split(segments.lengths)
        groups: list[PooledGroup] = []
        for task, indices in by_task.items():
            part = Segments(
                tuple(segments.lengths[i] for i in indices), tuple(segments.skips[i] for i in indices), segments.device
            )
            rows_TD = torch.cat([sequences[i] for i in indices])
            for group in self[task](rows_TD, part, [plans[i] for i in indices]):
                groups.append(PooledGroup(tuple(indices[i] for i in group.requests), group.values, group.rows))
        return groups


def _by_plan(plans: Sequence[PoolingPlan]) -> dict[PoolingPlan, tuple[int, ...]]:
    found: dict[PoolingPlan, list[int]] = {}
    for index, plan in enumerate(plans):
        found.setdefault(plan, []).append(index)
    return {plan: tuple(indices) for plan, indices in found.items()}


def _take(rows_NE: torch.Tensor, indices: tuple[int, ...]) -> torch.Tensor:
    if len(indices) == rows_NE.shape[0]:
        return rows_NE
    return rows_NE.index_select(0, torch.tensor(indices, device=rows_NE.device))
