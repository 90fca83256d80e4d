"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

import torch

from anypool.pooling.plan import PoolingPlan

# The results of a request's parts, in their order -> its own.
Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(eq=False)
class Request:
    """One prompt, tokenised and planned.

    A request with parts is not run itself: they are, and the last of their results makes its own. The first of their
    errors is its error, and cancels the others. Cancelling it cancels them.

    Attributes:
        request_id: The caller's name for it, or a running number.
        token_ids: What is run, special tokens included; at least one.
        plan: What it gets.
        token_type_ids: Segment ids of a text pair, for models that have them; None where all are 0.
        skip: Leading tokens that are not pooled.
        num_truncated_tokens: Ids that were cut off.
        future: Becomes the result, `[E]` or `[rows, E]`, or an error. Cancelling it drops the request while it waits.
        parts: What is run in its place.
        combine: Makes its result of theirs; there where there are parts.
    """

    request_id: str
    token_ids: list[int]
    plan: PoolingPlan
    token_type_ids: list[int] | None = None
    skip: int = 0
    num_truncated_tokens: int = 0
    future: Future[torch.Tensor] = field(default_factory=Future)
    parts: tuple[Request, ...] = ()
    combine: Combine | None = None

    def __post_init__(self) -> None:
        if self.parts:
            assert self.combine is not None
            _Join(self.future, [part.future for part in self.parts], self.combine).watch()

    def __len__(self) -> int:
        """How many tokens are run for it."""
        return sum(map(len, self.parts)) if self.parts else len(self.token_ids)


def leaves(requests: Iterable[Request]) -> list[Request]:
    """What is run for these requests: each, or its parts in its place."""
    return [one for request in requests for one in (leaves(request.parts) if request.parts else (request,))]


class _Join:
    """Ends a future when those of its parts end, once, in whichever thread ends the last of them."""

    def __init__(self, whole: Future[torch.Tensor], parts: Sequence[Future[torch.Tensor]], combine: Combine) -> None:
        self.whole, self.parts, self.combine = whole, parts, combine
        self._lock = Lock()
        self._waiting = len(parts)
        self._is_over = False

    def watch(self) -> None:
        self.whole.add_done_callback(self._whole_done)
        for part in self.parts:
            part.add_done_callback(self._part_done)

    def _whole_done(self, whole: Future[torch.Tensor]) -> None:
        for part in self.parts:
            part.cancel()

    def _part_done(self, part: Future[torch.Tensor]) -> None:
        error = None if part.cancelled() else part.exception()
        with self._lock:
            self._waiting -= 1
            if self._is_over or (self._waiting and error is None and not part.cancelled()):
                return
            self._is_over = True
        if part.cancelled():
            self.whole.cancel()
        if not self.whole.set_running_or_notify_cancel():
            return
        if error is not None:
            self.whole.set_exception(error)
            return
        try:
            result = self.combine([one.result() for one in self.parts])
        except Exception as problem:  # nobody may be left waiting
            self.whole.set_exception(problem)
        else:
            self.whole.set_result(result)
