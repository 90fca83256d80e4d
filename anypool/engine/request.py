"""A request on its way through the engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import torch

from anypool.config import is_int
from anypool.errors import InvalidParameterError, InvalidRequestError
from anypool.model_executor.images import ImageInputs
from anypool.pooling.plan import PoolingPlan

if TYPE_CHECKING:
    from anypool.engine.known_adapters import KnownAdapter

logger = logging.getLogger(__name__)

# The results of a request's parts, in their order -> its own.
Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(eq=False)
class Request:
    """One prompt, tokenised and planned.

    A request with parts is not run itself: they are, and the last of their results makes its own. The first of their
    errors is its error, and cancels the others. Cancelling it cancels them.

    A request with others `also` is run once for all of them: they have its tokens and another task, and end with it.

    Attributes:
        request_id: The caller's name for it, or a running number.
        token_ids: What is run, special tokens included; at least one.
        plan: What it gets.
        token_type_ids: Segment ids of a text pair, for models that have them; None where all are 0.
        images: What stands in the places of its image tokens; None for text alone.
        skip: Leading tokens that are not pooled.
        num_keys: Leading tokens that are attended to; None for all. Such a prompt is run whole.
        num_truncated_tokens: Ids that were cut off.
        num_cached_tokens: Ids whose keys were read from the prefix cache; known when the future is done.
        priority: Smaller ones run earlier.
        deadline: When nobody waits for the result any more, on `time.monotonic`'s clock; None for never.
        lora: The adapter that it is run with; None for none.
        cache_salt: Requests share cached prefixes only with those of the same salt.
        tag, arrival: Its place in the queue, set by the scheduler.
        submitted: When it was queued, on the same clock.
        started, finished: When its first forward pass began, and when its result was there, on the same clock.
        ran_out_of_memory: Whether it has had its one more try after memory was short.
        has_killed: Whether a replica died that had it; it has one more try.
        settled: Whether its answer has been given, or its cancellation noted.
        future: Becomes the result, `[E]` or `[rows, E]`, or an error. Cancelling it drops the request while it waits
            and between the chunks of a long prompt.
        parts: What is run in its place.
        combine: Makes its result of theirs; there where there are parts.
        is_answered: Whether it has its result without being run.
        also: Requests of other tasks that the same run answers, before it is answered itself.
    """

    request_id: str
    token_ids: list[int]
    plan: PoolingPlan
    token_type_ids: list[int] | None = None
    images: ImageInputs | None = None
    skip: int = 0
    num_keys: int | None = None
    num_truncated_tokens: int = 0
    num_cached_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    lora: KnownAdapter | None = None
    cache_salt: str | None = None
    tag: int = 0
    arrival: int = 0
    submitted: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    ran_out_of_memory: bool = False
    has_killed: bool = False
    settled: bool = False
    future: Future[torch.Tensor] = field(default_factory=Future)
    parts: tuple[Request, ...] = ()
    combine: Combine | None = None
    also: tuple[Request, ...] = ()
    is_answered: bool = False

    def __post_init__(self) -> None:
        if self.parts:
            assert self.combine is not None
            _Join(self.future, [part.future for part in self.parts], self.combine).watch()
        if self.also:
            self.future.add_done_callback(self._cancel_others)

    @property
    def results(self) -> list[torch.Tensor]:
        """Its result and those of the others, once it has one."""
        return [one.future.result() for one in (self, *self.also)]

    def __len__(self) -> int:
        """How many tokens are run for it."""
        return sum(map(len, self.parts)) if self.parts else len(self.token_ids)

    def is_gone(self, now: float) -> bool:
        """Whether nobody waits for it: it is cancelled, or past its deadline."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)

    def resolve(self, result: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> None:
        """Gives the results to whoever waits, unless they cancelled or have their answer."""
        for one, other in zip(self.also, others, strict=True):
            one.resolve(other)
        self.finished = time.monotonic()
        if self._settle():
            self._tell(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        """Gives the error to whoever waits, unless they cancelled or have their answer."""
        for one in self.also:
            one.fail(error)
        if self._settle():
            self._tell(lambda: self.future.set_exception(error))

    def _cancel_others(self, future: Future[torch.Tensor]) -> None:
        if future.cancelled():
            for one in self.also:
                one.future.cancel()

    def _settle(self) -> bool:
        with _settling:
            if self.settled:
                return False
            self.settled = True
        return self.future.set_running_or_notify_cancel()

    def _tell(self, give: Callable[[], None]) -> None:
        try:
            give()
        except BaseException:  # a caller's callback that raises SystemExit must not end the thread that calls it
            logger.exception("a callback of request %s raised", self.request_id)


# `Engine.close` may give up on a device thread that gives its answers after all.
_settling = Lock()


def check_turn(priority: int, timeout_s: float | None) -> None:
    """Refuses what no queue or clock can order."""
    if not is_int(priority):
        raise InvalidParameterError(f"priority={priority!r} is not an integer", param="priority")
    if timeout_s is not None and (not isinstance(timeout_s, (int, float)) or math.isnan(timeout_s)):
        raise InvalidParameterError(f"timeout_s={timeout_s!r} is not a number of seconds", param="timeout_s")


def check_new(requests: Sequence[Request]) -> None:
    """Refuses a request that was queued before, or that is there twice."""
    seen: set[Request] = set()
    for request in requests:
        if request.submitted or request in seen:
            raise InvalidRequestError(f"request {request.request_id} is queued twice: prepare one for each result")
        seen.add(request)


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
