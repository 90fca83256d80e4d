"""A text that is longer than the model takes: the windows it is run in, and one result made of theirs.

Every window is a text in itself: the special tokens, and the prompt before the text, stand in each. Windows are
equally long, and share tokens with their neighbours, so that a token at the edge of one has something around it.
Where tokens are counted or given rows, each belongs to the first window that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anypool.errors import PromptTooLongError
from anypool.pooling.plan import PoolingDefaults, PoolingPlan
from anypool.pooling.pooler import finish_embeddings, finish_scores
from anypool.pooling.sparse import pack_weights, prune
from anypool.pooling.tasks import PoolingTask

# Of the part of a window that is for the text, where nobody says: 512 of 8,192 tokens, as in late chunking
# (Günther et al., arXiv:2409.04701).
_OVERLAP_SHARE = 16
# A prompt or a query may take so much of each window that hardly any text fits into one; past this it is refused.
_LEAST_SHARE = 8


@dataclass(frozen=True)
class Window:
    """A part of a text that is run by itself.

    Attributes:
        token_ids: What is run.
        token_type_ids: Segment ids of a text pair; None where all are 0.
        start, end: The places in the text's ids of the tokens that belong to this window and to none before it.
        offset: Where the first of them stands in `token_ids`.
        weight: How many of them are the text's own, neither special tokens nor those of a prompt.
    """

    token_ids: list[int]
    token_type_ids: list[int] | None = None
    start: int = 0
    end: int = 0
    offset: int = 0
    weight: int = 0


def spread(length: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Start and end of each window over `length` tokens, each `room` long; the last one ends with the tokens.

    Args:
        length: More than `room`.
        room: More than `overlap`.
        overlap: How many tokens a window shares with the next one; the last two may share more.
    """
    step = room - overlap
    count = 1 + math.ceil((length - room) / step)
    starts = [min(i * step, length - room) for i in range(count)]
    return [(start, start + room) for start in starts]


def split(ids: Sequence[int], *, head: int, tail: int, size: int, overlap: int) -> list[Window]:
    """Windows over a text.

    Args:
        ids: The text's ids, more than `size`.
        head, tail: How many of them, at the beginning and at the end, stand in every window.
        size: Tokens per window.
        overlap: How many of the text's own tokens a window shares with the next one.
    """
    body = len(ids) - head - tail
    windows = []
    done = 0
    for start, end in spread(body, size - head - tail, overlap):
        is_first, is_last = start == 0, end == body
        windows.append(
            Window(
                [*ids[:head], *ids[head + start : head + end], *ids[len(ids) - tail :]],
                start=0 if is_first else head + done,
                end=len(ids) if is_last else head + end,
                offset=0 if is_first else head + done - start,
                weight=end - done,
            )
        )
        done = end
    return windows


def room_for_text(others: int, size: int, overlap: int | None, what: str) -> tuple[int, int]:
    """How many tokens of a text fit into a window, and how many of these it shares with the next one.

    Args:
        others: Tokens that stand in every window beside them.
        size: Tokens per window.
        overlap: As configured.
        what: The text, for messages.

    Raises:
        PromptTooLongError: The other tokens leave too little, or less than twice the overlap.
    """
    room = size - others
    if room * _LEAST_SHARE < size:
        raise PromptTooLongError(
            f"{what}: special tokens, prompt or query take {others:,} of a window's {size:,} tokens, and at least "
            f"{math.ceil(size / _LEAST_SHARE):,} must be left for the text: shorten them, or pass "
            "truncate_prompt_tokens=-1"
        )
    shared = room // _OVERLAP_SHARE if overlap is None else overlap
    if 2 * shared > room:
        raise PromptTooLongError(
            f"{what}: a window has {room:,} tokens for the text, and chunk_overlap={shared:,} is more than half of "
            "them: shorten the prompt or query, or pass truncate_prompt_tokens=-1"
        )
    return room, shared


# What is run in a text's place.
Parts = list[tuple[Window, PoolingPlan]]


class WeightedMean:
    """A text's result from those of its windows: their mean, weighted by the tokens that belong to each.

    It is taken before vectors are cut and normalised, and of scores before calibration and activation.
    """

    def __init__(self, plan: PoolingPlan, windows: Sequence[Window], *, scores: bool) -> None:
        self.plan, self.scores = plan, scores
        self.weights_W = torch.tensor([window.weight for window in windows], dtype=torch.float32, device="cpu")
        self.parts: Parts = [(window, _raw(plan)) for window in windows]

    def __call__(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        mean_1E = (self.weights_W @ torch.stack(list(results)) / self.weights_W.sum())[None]
        if self.scores:
            return finish_scores(mean_1E, self.plan)[0]
        return finish_embeddings(mean_1E, self.plan)[0]


class Best:
    """The highest score of any window: a document is as relevant as its best passage (Dai & Callan, 2019)."""

    def __init__(self, plan: PoolingPlan, windows: Sequence[Window]) -> None:
        self.parts: Parts = [(window, plan) for window in windows]

    def __call__(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(results)).amax(dim=0)


class LargestWeights:
    """A sparse vector of the largest weights that any window has: of a maximum over tokens, that over all of them."""

    def __init__(self, plan: PoolingPlan, windows: Sequence[Window]) -> None:
        self.plan = plan
        self.parts: Parts = [(window, _raw(plan)) for window in windows]

    def __call__(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        rows_K2 = torch.cat(list(results))
        indices_K, places_K = rows_K2[:, 0].unique(return_inverse=True)
        largest_K = torch.zeros_like(indices_K).scatter_reduce_(0, places_K, rows_K2[:, 1], "amax")
        return prune(pack_weights(indices_K, largest_K), self.plan.max_active_dims)


class JoinedRows:
    """A row for each token of the text, from the window that the token belongs to."""

    def __init__(self, plan: PoolingPlan, windows: Sequence[Window], ids: Sequence[int]) -> None:
        self.ids, self.step_tag_id = ids, plan.step_tag_id
        self.parts: Parts = [(window, replace(plan, step_tag_id=None)) for window in windows]

    def __call__(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces = []
        for (window, _), rows_LE in zip(self.parts, results, strict=True):
            if len(rows_LE) != len(window.token_ids):
                raise PromptTooLongError(
                    f"a text of {len(self.ids):,} tokens is run in windows, and this model's pooler gave "
                    f"{len(rows_LE):,} rows for a window of {len(window.token_ids):,}, which cannot be joined: "
                    "pass truncate_prompt_tokens=-1, or split the text"
                )
            pieces.append(rows_LE[window.offset : window.offset + window.end - window.start])
        rows_TE = torch.cat(pieces)
        if self.step_tag_id is None:
            return rows_TE
        return rows_TE[torch.tensor(self.ids) == self.step_tag_id]


class SpanMeans:
    """A vector for each span of the text. One that lies in several windows has the mean of its pieces' vectors.

    It is weighted by their tokens and taken before vectors are cut and normalised.
    """

    def __init__(self, plan: PoolingPlan, windows: Sequence[Window]) -> None:
        self.plan = plan
        self.parts: Parts = []
        self.pieces: list[list[tuple[int, int]]] = []  # of each part: which span, and how many tokens of it
        for window in windows:
            spans, pieces = [], []
            for index, (start, end) in enumerate(plan.spans):
                first, last = max(start, window.start), min(end, window.end)
                if first < last:
                    moved = window.offset - window.start
                    spans.append((first + moved, last + moved))
                    pieces.append((index, last - first))
            if spans:
                self.parts.append((window, replace(_raw(plan), spans=tuple(spans))))
                self.pieces.append(pieces)

    def __call__(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        sums_SE = torch.zeros(len(self.plan.spans), results[0].shape[-1], dtype=torch.float32)
        for rows_SE, pieces in zip(results, self.pieces, strict=True):
            indices_S, counts_S = torch.tensor(pieces).unbind(dim=1)
            sums_SE.index_add_(0, indices_S, rows_SE * counts_S[:, None])
        lengths_S = torch.tensor([end - start for start, end in self.plan.spans])
        return finish_embeddings(sums_SE / lengths_S[:, None], self.plan)


Combination = WeightedMean | Best | LargestWeights | JoinedRows | SpanMeans


def combination(
    plan: PoolingPlan, windows: Sequence[Window], ids: Sequence[int], *, best: bool, defaults: PoolingDefaults
) -> Combination | None:
    """How the results of a text's windows become its own; None where they cannot.

    A reward is about the whole text, and so is a sparse vector that is more than the maximum over its tokens.

    Args:
        plan: What the text gets.
        windows: Of the text.
        ids: Its ids.
        best: Whether the text is a query and a document, of which the document is in windows.
        defaults: Of the model: which of its tasks give scores.
    """
    scores = defaults.scores.get(plan.task)
    if best:
        return Best(plan, windows)
    if plan.task is PoolingTask.SPARSE_EMBED:
        assert defaults.sparse is not None
        return LargestWeights(plan, windows) if defaults.sparse.joins_windows else None
    if plan.spans:
        return SpanMeans(plan, windows)
    if scores is not None and plan.task is PoolingTask.REWARD:
        return None
    if plan.task is PoolingTask.EMBED or (scores is not None and not scores.token_level):
        return WeightedMean(plan, windows, scores=scores is not None)
    return JoinedRows(plan, windows, ids)


def _raw(plan: PoolingPlan) -> PoolingPlan:
    """The plan without what is done to a finished row: results that may be averaged."""
    return PoolingPlan(task=plan.task)
