"""A pooler is pooling type + head for one task; a model's `DispatchPooler` holds one per task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from anypool.kernels.normalize_cut import normalize_cut
from anypool.pooling.activations import SCORE_ACTIVATIONS
from anypool.pooling.methods import PoolingType, Segments, pool, span_means
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
    """One vector per sequence, or per span of it: pooling types, head modules in order, cut, normalise.

    The vector of a span is that of a text with its tokens alone: their mean, whatever the pooling types are.

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
        groups = []
        for plan, indices in _by_plan(plans).items():
            rows = None
            values = _take(rows_NE, indices)
            if plan.spans:
                sequences = hidden_TD.split(segments.lengths)
                values = self.head(torch.cat([span_means(sequences[i], plan.spans) for i in indices]))
                rows = (len(plan.spans),) * len(indices)
            values = normalize_cut(values, dimensions=plan.dimensions, normalize=plan.normalize)
            groups.append(PooledGroup(indices, values, rows))
        return groups


class TokenEmbedPooler(Pooler):
    """One vector per token: the hidden states, normalised where the plan says so."""

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = []
        for plan, indices in _by_plan(plans).items():
            values = normalize_cut(_rows_of(hidden_TD, segments, indices).float(), normalize=plan.normalize)
            groups.append(PooledGroup(indices, values, tuple(segments.lengths[i] for i in indices)))
        return groups


class ScorePooler(Pooler):
    """One row of scores per sequence: pooling types, head, calibration, activation.

    Args:
        types: Sequence-level pooling types, concatenated.
        head: Modules over float32 rows, ending in one column per label.
    """

    def __init__(self, types: tuple[PoolingType, ...], head: nn.Module) -> None:
        super().__init__()
        self.types = types
        self.head = head

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        logits_NC = self.head(pool(hidden_TD, segments, self.types))
        return [
            PooledGroup(indices, finish_scores(_take(logits_NC, indices), plan))
            for plan, indices in _by_plan(plans).items()
        ]


class TokenScorePooler(Pooler):
    """One row of scores per token, or per step tag.

    Args:
        head: Modules over float32 rows, ending in one column per label.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = []
        for plan, indices in _by_plan(plans).items():
            rows_TD = _rows_of(hidden_TD, segments, indices)
            kept = tuple(segments.lengths[i] for i in indices)
            if plan.step_tag_id is not None:  # before the head, so that it runs on the kept rows only
                assert segments.input_ids_T is not None
                is_tag_T = _rows_of(segments.input_ids_T, segments, indices) == plan.step_tag_id
                rows_TD = rows_TD[is_tag_T]
                kept = tuple(int(part.sum()) for part in is_tag_T.split(kept))
            groups.append(PooledGroup(indices, finish_scores(self.head(rows_TD.float()), plan), kept))
        return groups


def finish_scores(logits_NC: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
    """Chosen columns, calibration (x - mean) / sigma, activation, reported column."""
    if plan.returned_columns is not None:
        logits_NC = logits_NC[:, list(plan.returned_columns)]
    if plan.logit_mean != 0.0 or plan.logit_sigma != 1.0:
        logits_NC = (logits_NC - plan.logit_mean) / plan.logit_sigma
    scores_NC = SCORE_ACTIVATIONS[plan.activation](logits_NC)
    if plan.reported_column is not None:
        scores_NC = scores_NC[:, plan.reported_column : plan.reported_column + 1]
    return scores_NC


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
        groups: list[PooledGroup] = []
        for task, indices in by_task.items():
            rows_TD = _rows_of(hidden_TD, segments, indices)
            for group in self[task](rows_TD, segments.subset(indices), [plans[i] for i in indices]):
                groups.append(PooledGroup(tuple(indices[i] for i in group.requests), group.values, group.rows))
        return groups


def _by_plan(plans: Sequence[PoolingPlan]) -> dict[PoolingPlan, tuple[int, ...]]:
    found: dict[PoolingPlan, list[int]] = {}
    for index, plan in enumerate(plans):
        found.setdefault(plan, []).append(index)
    return {plan: tuple(indices) for plan, indices in found.items()}


def _rows_of(rows_TD: torch.Tensor, segments: Segments, indices: Sequence[int]) -> torch.Tensor:
    """The packed rows of some sequences."""
    if len(indices) == len(segments.lengths):
        return rows_TD
    sequences = rows_TD.split(segments.lengths)
    return torch.cat([sequences[i] for i in indices])


def _take(rows_NE: torch.Tensor, indices: tuple[int, ...]) -> torch.Tensor:
    if len(indices) == rows_NE.shape[0]:
        return rows_NE
    return rows_NE.index_select(0, torch.tensor(indices, device=rows_NE.device))
