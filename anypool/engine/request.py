"""A request on its way through the engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from anypool.pooling.plan import PoolingPlan


@dataclass(eq=False)
class Request:
    """One prompt, tokenised and planned.

    Attributes:
        request_id: The caller's name for it, or a running number.
        token_ids: What is run, special tokens included; at least one.
        plan: What it gets.
        token_type_ids: Segment ids of a text pair, for models that have them; None where all are 0.
        skip: Leading tokens that are not pooled.
        num_truncated_tokens: Ids that were cut off.
        future: Becomes the result, `[E]` or `[tokens, E]`, or an error. Cancelling it drops the request while it waits.
    """

    request_id: str
    token_ids: list[int]
    plan: PoolingPlan
    token_type_ids: list[int] | None = None
    skip: int = 0
    num_truncated_tokens: int = 0
    future: Future[torch.Tensor] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.token_ids)
