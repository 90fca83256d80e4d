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
        num_cached_tokens: Ids whose keys were read from the prefix cache; known when the future is done.
        priority: Smaller ones run earlier.
        deadline: When nobody waits for the result any more, on `time.monotonic`'s clock; None for never.
        cache_salt: Requests share cached prefixes only with those of the same salt.
        tag, arrival: Its place in the queue, set by the scheduler.
        submitted: When it was queued, on the same clock.
        ran_out_of_memory: Whether it has had its one more try after memory was short.
        settled: Whether its answer has been given, or its cancellation noted.
        future: Becomes the result, `[E]` or `[tokens, E]`, or an error. Cancelling it drops the request while it
            waits and between the chunks of a long prompt.
    """

    request_id: str
    token_ids: list[int]
    plan: PoolingPlan
    token_type_ids: list[int] | None = None
    skip: int = 0
    num_truncated_tokens: int = 0
    num_cached_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    tag: int = 0
    arrival: int = 0
    submitted: float = 0.0
    ran_out_of_memory: bool = False
    settled: bool = False
    future: Future[torch.Tensor] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.token_ids)

    def is_gone(self, now: float) -> bool:
        """Whether nobody waits for it: it is cancelled, or past its deadline."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)

    def resolve(self, result: torch.Tensor) -> None:
        """Gives the result to whoever waits, unless they cancelled or have their answer."""
        if self._settle():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Gives the error to whoever waits, unless they cancelled or have their answer."""
        if self._settle():
            self.future.set_exception(error)

    def _settle(self) -> bool:
        if self.settled:
            return False
        self.settled = True
        return self.future.set_running_or_notify_cancel()
