"""A pooler is pooling type + head for one task; a model's `DispatchPooler` holds one per task.

Each has a batched form, `forward`, and one for a text whose hidden states come in chunks, `begin`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.normalize_cut import normalize_cut
from anypool.kernels.score_head import score_head
from anypool.kernels.segment_pool import segment_pool
from anypool.kernels.token_pool import Finish, token_pool
from anypool.pooling.activations import SCORE_ACTIVATIONS
from anypool.pooling.heads import Dense
from anypool.pooling.methods import PoolingType, Segments, method_of, pool, row_of, span_means
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.streaming import PoolingState, SpanMeans, pooling_state
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
    """Hidden states of the requests of one task -> their results.

    Attributes:
        left_out: How many leading tokens of a text never have a result of their own.
    """

    left_out: ClassVar[int] = 0

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

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        """Starts pooling one text whose hidden states come in chunks.

        A pooler that says nothing else keeps them all and pools the whole text in the end.

        Args:
            plan: What the text gets.
            skip: Leading tokens that are not pooled.
            pad_token_id: What LAST_NOT_PAD passes over.
        """
        return _Whole(self, plan, skip, pad_token_id)


class ChunkedPooling(ABC):
    """One text on its way through a pooler, a chunk at a time."""

    @abstractmethod
    def update(self, hidden_LD: torch.Tensor, ids_L: torch.Tensor) -> None:
        """Takes the next chunk.

        Args:
            hidden_LD: `[L, D]` hidden states, any float dtype. The memory is the caller's: it may be overwritten.
            ids_L: `[L]` their token ids.
        """

    @abstractmethod
    def result(self) -> PooledGroup:
        """What `forward` gives for the whole text."""


class _Whole(ChunkedPooling):
    """Keeps every hidden state."""

    def __init__(self, pooler: Pooler, plan: PoolingPlan, skip: int, pad_token_id: int | None) -> None:
        self.pooler, self.plan, self.skip, self.pad_token_id = pooler, plan, skip, pad_token_id
        self.hidden: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []

    def update(self, hidden_LD: torch.Tensor, ids_L: torch.Tensor) -> None:
        self.hidden.append(hidden_LD.clone())
        self.ids.append(ids_L.clone())

    def result(self) -> PooledGroup:
        hidden_TD, ids_T = torch.cat(self.hidden), torch.cat(self.ids)
        segments = Segments((len(ids_T),), (self.skip,), ids_T.device, ids_T, self.pad_token_id)
        [group] = self.pooler(hidden_TD, segments, [self.plan])
        return cast(PooledGroup, group)


class RowByRow(ChunkedPooling):
    """Pools each chunk by itself: for results of one row per token."""

    def __init__(self, pooler: Pooler, plan: PoolingPlan) -> None:
        self.pooler, self.plan = pooler, plan
        self.chunks: list[torch.Tensor] = []

    def update(self, hidden_LD: torch.Tensor, ids_L: torch.Tensor) -> None:
        [group] = self.pooler(hidden_LD, Segments((len(ids_L),), (0,), ids_L.device, ids_L), [self.plan])
        self.chunks.append(group.values.clone())

    def result(self) -> PooledGroup:
        values = torch.cat(self.chunks)
        return PooledGroup((0,), values, (len(values),))


class SequencePooler(Pooler):
    """One row per sequence: pooling types, head, and how a task finishes the rows.

    Args:
        types: Sequence-level pooling types, concatenated.
        head: Modules over float32 rows.
    """

    head: nn.Module

    def __init__(self, types: tuple[PoolingType, ...], head: nn.Module) -> None:
        super().__init__()
        assert types and PoolingType.ALL not in types
        self.types = types
        self.head = head

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = by_plan(plans)
        if len(groups) == 1:
            [(plan, indices)] = groups.items()
            return [PooledGroup(indices, self.results(hidden_TD, segments, plan))]
        rows_NE = self.head(pool(hidden_TD, segments, self.types))
        return [PooledGroup(indices, self.finish(_take(rows_NE, indices), plan)) for plan, indices in groups.items()]

    def results(self, hidden_TD: torch.Tensor, segments: Segments, plan: PoolingPlan) -> torch.Tensor:
        """`[N, E]` float32 results of sequences that share a plan; nothing of it waits for the device."""
        return self.finish(self.head(pool(hidden_TD, segments, self.types)), plan)

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        states = [pooling_state(kind, skip=skip, pad_token_id=pad_token_id) for kind in self.types]
        return _Folded(self, states, plan)

    @abstractmethod
    def finish(self, rows_NE: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
        """Rows after the head -> results, for requests that share a plan."""


class _Folded(ChunkedPooling):
    """Folds chunks into one state per pooling type, so that memory does not grow with the text."""

    def __init__(self, pooler: SequencePooler, states: list[PoolingState], plan: PoolingPlan) -> None:
        self.pooler, self.states, self.plan = pooler, states, plan

    def update(self, hidden_LD: torch.Tensor, ids_L: torch.Tensor) -> None:
        for state in self.states:
            state.update(hidden_LD, ids_L)

    def result(self) -> PooledGroup:
        rows = torch.cat([state.result() for state in self.states], dim=-1)
        if rows.dim() == 1:
            return PooledGroup((0,), self.pooler.finish(self.pooler.head(rows[None]), self.plan))
        return PooledGroup((0,), self.pooler.finish(self.pooler.head(rows), self.plan), (len(rows),))


class EmbedPooler(SequencePooler):
    """One vector per sequence, or per span of it: pooling types, head modules in order, cut, normalise.

    The vector of a span is that of a text with its tokens alone: their mean, whatever the pooling types are.

    Args:
        types: Sequence-level pooling types, concatenated.
        head: Modules over float32 rows; may be empty.
    """

    def __init__(self, types: tuple[PoolingType, ...], head: nn.Sequential | None = None) -> None:
        super().__init__(types, head if head is not None else nn.Sequential())

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = super().forward(hidden_TD, segments, plans)
        return [self._spans(group, hidden_TD, segments, plans[group.requests[0]]) for group in groups]

    def _spans(self, group: PooledGroup, hidden_TD: torch.Tensor, segments: Segments, plan: PoolingPlan) -> PooledGroup:
        """What a group gets whose plan has spans: a row for each in place of one for all."""
        if not plan.spans:
            return group
        sequences = hidden_TD.split(segments.lengths)
        rows = self.head(torch.cat([span_means(sequences[i], plan.spans) for i in group.requests]))
        return PooledGroup(group.requests, self.finish(rows, plan), (len(plan.spans),) * len(group.requests))

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        if plan.spans:
            return _Folded(self, [SpanMeans(plan.spans)], plan)
        return super().begin(plan, skip=skip, pad_token_id=pad_token_id)

    def results(self, hidden_TD: torch.Tensor, segments: Segments, plan: PoolingPlan) -> torch.Tensor:
        is_plain = _is_empty(self.head) and not plan.norms_before_cut
        if not is_plain or len(self.types) > 1 or self.types[0] is PoolingType.LAST_NOT_PAD:
            return super().results(hidden_TD, segments, plan)
        return segment_pool(
            hidden_TD,
            segments.cu_seqlens,
            method_of(self.types[0]),
            skips_N=segments.skips_N,
            dimensions=plan.dimensions,
            normalize=plan.normalize,
        )

    def finish(self, rows_NE: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
        return finish_embeddings(rows_NE, plan)


class TokenEmbedPooler(Pooler):
    """One vector per token: the hidden states, normalised where the plan says so."""

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        groups = []
        for plan, indices in by_plan(plans).items():
            finish: Finish = "normalize" if plan.normalize else "none"
            values = token_pool(rows_of(hidden_TD, segments, indices), finish=finish)
            groups.append(PooledGroup(indices, values, tuple(segments.lengths[i] for i in indices)))
        return groups

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        return RowByRow(self, plan)


class ScorePooler(SequencePooler):
    """One row of scores per sequence: pooling types, head, calibration, activation.

    Args:
        types: Sequence-level pooling types, concatenated.
        head: Modules over float32 rows, ending in one column per label.
    """

    def results(self, hidden_TD: torch.Tensor, segments: Segments, plan: PoolingPlan) -> torch.Tensor:
        index_N = row_of(self.types[0], segments) if len(self.types) == 1 else None
        if index_N is not None:
            return score_rows(self.head, hidden_TD, plan, index_N)
        return score_rows(self.head, pool(hidden_TD, segments, self.types), plan)

    def finish(self, rows_NE: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
        return finish_scores(rows_NE, plan)


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
        for plan, indices in by_plan(plans).items():
            rows_TD = rows_of(hidden_TD, segments, indices)
            kept = tuple(segments.lengths[i] for i in indices)
            index_S = None
            if plan.step_tag_id is not None:  # before the head, so that it runs on the kept rows only
                assert segments.input_ids_T is not None
                is_tag_T = rows_of(segments.input_ids_T, segments, indices) == plan.step_tag_id
                index_S = is_tag_T.nonzero().squeeze(1)
                kept = tuple(int(part.sum()) for part in is_tag_T.cpu().split(kept))
            groups.append(PooledGroup(indices, score_rows(self.head, rows_TD, plan, index_S), kept))
        return groups

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        return RowByRow(self, plan)


def score_rows(
    head: nn.Module, rows_TD: torch.Tensor, plan: PoolingPlan, index_N: torch.Tensor | None = None
) -> torch.Tensor:
    """What a head and a plan make of rows, its last layer with what follows in one pass where it is a plain product.

    Args:
        head: Modules over float32 rows, ending in one column per label.
        rows_TD: `[T, D]`, any float dtype.
        plan: How the scores are finished.
        index_N: The rows that are scored; None for all.

    Returns:
        `[N or T, columns]` float32.
    """
    layers = list(head) if isinstance(head, nn.Sequential) else [head]
    last = layers[-1] if layers else None
    if not (isinstance(last, Dense) and last.is_plain_product and last.linear.weight.dtype == torch.float32):
        return finish_scores(head(token_pool(rows_TD, index_S=index_N)), plan)
    if len(layers) > 1:
        rows_TD, index_N = token_pool(rows_TD, index_S=index_N), None
        for layer in layers[:-1]:
            rows_TD = layer(rows_TD)
    weight_CD: torch.Tensor = last.linear.weight
    bias_C: torch.Tensor | None = last.linear.bias
    if plan.returned_columns is not None:
        weight_CD = _columns(weight_CD.T, plan.returned_columns).T
        bias_C = None if bias_C is None else _columns(bias_C[None], plan.returned_columns)[0]
    scores_NC = score_head(
        rows_TD,
        weight_CD,
        bias_C,
        index_N=index_N,
        mean=plan.logit_mean,
        sigma=plan.logit_sigma,
        activation=plan.activation,
    )
    return _reported(scores_NC, plan)


def finish_embeddings(rows_NE: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
    """Layer norm where the plan has one, cut, L2 norm."""
    if plan.norms_before_cut and plan.dimensions is not None:
        rows_NE = F.layer_norm(rows_NE, rows_NE.shape[-1:])
    return normalize_cut(rows_NE, dimensions=plan.dimensions, normalize=plan.normalize)


def finish_scores(logits_NC: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
    """Chosen columns, calibration (x - mean) / sigma, activation, reported column."""
    if plan.returned_columns is not None:
        logits_NC = _columns(logits_NC, plan.returned_columns)
    if plan.logit_mean != 0.0 or plan.logit_sigma != 1.0:
        logits_NC = (logits_NC - plan.logit_mean) / plan.logit_sigma
    return _reported(SCORE_ACTIVATIONS[plan.activation](logits_NC), plan)


def _columns(rows_NC: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """Some columns, by slices: an index would have to be copied to the device."""
    return torch.cat([rows_NC[:, column : column + 1] for column in chosen], dim=1)


def _reported(scores_NC: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
    column = plan.reported_column
    return scores_NC if column is None else scores_NC[:, column : column + 1]


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

    def remove(self, task: PoolingTask) -> None:
        """Serves a task no longer."""
        self.poolers.pop(task.value)

    def __getitem__(self, task: PoolingTask) -> Pooler:
        return cast(Pooler, self.poolers[task.value])

    def graphable(self, plan: PoolingPlan) -> SequencePooler | None:
        """The pooler of a plan whose results have the same shape for every text and need nothing from the host.

        A graph holds its `results`, so a class with a `forward` of its own is none.
        """
        pooler = self[plan.task]
        if not isinstance(pooler, SequencePooler) or plan.spans:
            return None
        return pooler if type(pooler).forward in (SequencePooler.forward, EmbedPooler.forward) else None

    def begin(self, plan: PoolingPlan, *, skip: int = 0, pad_token_id: int | None = None) -> ChunkedPooling:
        return self[plan.task].begin(plan, skip=skip, pad_token_id=pad_token_id)

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        by_task: dict[PoolingTask, list[int]] = {}
        for index, plan in enumerate(plans):
            by_task.setdefault(plan.task, []).append(index)
        if len(by_task) == 1:
            return cast(list[PooledGroup], self[plans[0].task](hidden_TD, segments, plans))
        groups: list[PooledGroup] = []
        for task, indices in by_task.items():
            rows_TD = rows_of(hidden_TD, segments, indices)
            for group in self[task](rows_TD, segments.subset(indices), [plans[i] for i in indices]):
                groups.append(PooledGroup(tuple(indices[i] for i in group.requests), group.values, group.rows))
        return groups


def _is_empty(head: nn.Module) -> bool:
    return isinstance(head, nn.Sequential) and len(head) == 0


def by_plan(plans: Sequence[PoolingPlan]) -> dict[PoolingPlan, tuple[int, ...]]:
    """The places of the sequences that share a plan."""
    found: dict[PoolingPlan, list[int]] = {}
    for index, plan in enumerate(plans):
        found.setdefault(plan, []).append(index)
    return {plan: tuple(indices) for plan, indices in found.items()}


def rows_of(rows_TD: torch.Tensor, segments: Segments, indices: Sequence[int]) -> torch.Tensor:
    """The packed rows of some sequences."""
    if len(indices) == len(segments.lengths):
        return rows_TD
    sequences = rows_TD.split(segments.lengths)
    return torch.cat([sequences[i] for i in indices])


def _take(rows_NE: torch.Tensor, indices: tuple[int, ...]) -> torch.Tensor:
    if len(indices) == rows_NE.shape[0]:
        return rows_NE
    return rows_NE.index_select(0, torch.tensor(indices, device=rows_NE.device))
