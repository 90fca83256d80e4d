"""The engine for asyncio: preparing on a small pool of threads, results without a thread per caller."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.engine.preparation import PromptOptions
from anypool.engine.prompts import Prompt, TextPair
from anypool.engine.request import Request
from anypool.errors import DeadlineExceededError, EngineDeadError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask

Served = tuple[list[Request], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How a call is served.

    Attributes:
        bounded: Whether a full queue refuses it.
        priority: Smaller ones run earlier; 0 is usual.
        timeout_s: Seconds until it fails with a `DeadlineExceededError`; None for never.
        cache_salt: Share cached prefixes only with calls of the same salt.
    """

    bounded: bool = True
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None


# Calls of fewer characters are prepared together, larger ones by themselves.
_SMALL = 16_384


@dataclass(eq=False)
class _Call:
    """One caller's prompts, from arrival to answer. `is_over` once nobody waits for the answer."""

    prepare: Callable[[], Sequence[Request]]
    options: ServingOptions
    answer: asyncio.Future[Served]
    deadline: float | None
    requests: Sequence[Request] = ()
    unfinished: int = 0
    error: BaseException | None = None
    is_over: bool = False


class AsyncEngine:
    """Serves many callers of one event loop. Calls that arrive together are prepared and queued together.

    Args:
        engine: What runs them, or what to start one with.
        threads: Threads that prepare prompts, at least 2: one is kept for small calls. A call that is being prepared
            cannot be stopped, so this is also how many can be busy for callers that have gone.
    """

    def __init__(self, engine: Engine | EngineConfig, *, threads: int = 4) -> None:
        assert threads >= 2
        self.engine = engine if isinstance(engine, Engine) else Engine(engine)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="anypool-prepare")
        self._idle_threads = threads
        self._small: list[_Call] = []
        self._large: deque[_Call] = deque()
        self._answered: deque[_Call] = deque()  # filled by other threads, emptied by the loop
        self._lock = threading.Lock()

    async def run(
        self,
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt],
        task: PoolingTask,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_options: PromptOptions | None = None,
        options: ServingOptions | None = None,
    ) -> Served:
        """Runs prompts. Cancelling the awaiting task drops those that have not run.

        Args:
            prompts: As for `Engine.prepare`.
            task: What each gets.
            params: For all of them, or one per prompt.
            prompt_options: How prompts become token ids.
            options: How the call is served.

        Returns:
            The requests, and a result for each.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served; nothing has been run then.
            OverloadedError: The queue is full.
            DeadlineExceededError: The time was up.
            EngineError: The engine failed on a prompt; the others are dropped.
        """
        prepare = functools.partial(self.engine.prepare, prompts, task, params, prompt_options)
        size = sum(len(prompt) if isinstance(prompt, (str, list)) else _SMALL // 64 for prompt in prompts)
        return await self.serve(prepare, options, size=size)

    async def serve(
        self, prepare: Callable[[], Sequence[Request]], options: ServingOptions | None = None, *, size: int = 0
    ) -> Served:
        """Runs the requests that `prepare` returns. Otherwise as `run`.

        Args:
            prepare: Called on a thread.
            options: How the call is served.
            size: About how many characters it has to read.
        """
        options, loop = options or ServingOptions(), asyncio.get_running_loop()
        deadline = None if options.timeout_s is None else time.monotonic() + options.timeout_s
        call = _Call(prepare, options, loop.create_future(), deadline)
        timer = None if options.timeout_s is None else loop.call_later(options.timeout_s, _expire, call)
        (self._small if size < _SMALL else self._large).append(call)
        loop.call_soon(self._dispatch, loop)  # after all others that are ready in this turn of the loop
        try:
            return await call.answer
        finally:
            call.is_over = True
            if timer is not None:
                timer.cancel()
            for request in call.requests:  # after an error, or when the caller is gone, nobody wants the rest
                request.future.cancel()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Stops the engine; queued calls get `drain_s` seconds to be answered, the rest an error."""
        await asyncio.to_thread(self.engine.close, drain_s=drain_s)
        self._pool.shutdown(wait=False)
        for call in (*self._small, *self._large):
            if not call.answer.done():
                call.answer.set_exception(EngineDeadError("the engine is shut down"))
        self._small.clear()
        self._large.clear()

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands what has arrived to idle threads."""
        if self._small and self._idle_threads:
            calls, self._small = self._small, []
            self._start(calls, loop)
        while self._large and self._idle_threads > 1:
            self._start([self._large.popleft()], loop)

    def _start(self, calls: Sequence[_Call], loop: asyncio.AbstractEventLoop) -> None:
        self._idle_threads -= 1
        self._pool.submit(self._prepare, calls, loop).add_done_callback(lambda _: self._wake(loop, self._is_idle, loop))

    def _is_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._idle_threads += 1
        self._dispatch(loop)

    def _prepare(self, calls: Sequence[_Call], loop: asyncio.AbstractEventLoop) -> None:
        """On a thread: prepares calls, then queues them all, so that they can share a batch."""
        ready = []
        for call in calls:
            try:
                if not call.is_over:
                    call.requests = call.prepare()
                    ready.append(call)
            except BaseException as error:  # the caller's, whatever it is
                self._fail(call, error, loop)
        for call in ready:
            try:
                self._submit(call, loop)
            except Exception as error:
                self._fail(call, error, loop)

    def _submit(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        call.unfinished = len(call.requests)
        if not call.requests:
            self._answer(call, loop)
        if call.is_over:
            return
        self.engine.submit(
            call.requests,
            bounded=call.options.bounded,
            priority=call.options.priority,
            timeout_s=None if call.deadline is None else call.deadline - time.monotonic(),
            cache_salt=call.options.cache_salt,
        )
        for request in call.requests:
            request.future.add_done_callback(lambda future: self._count_down(call, future, loop))
        if call.is_over:  # the caller has gone meanwhile
            for request in call.requests:
                request.future.cancel()

    def _count_down(self, call: _Call, future: Future[torch.Tensor], loop: asyncio.AbstractEventLoop) -> None:
        """A request has its answer: on the device thread, or at once where it had it before."""
        if future.cancelled():
            return
        with self._lock:
            call.unfinished -= 1
            is_last = call.unfinished == 0
        if (error := future.exception()) is not None:
            self._fail(call, error, loop)
        elif is_last:
            self._answer(call, loop)

    def _fail(self, call: _Call, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        call.error = call.error or error
        self._answer(call, loop)

    def _answer(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Wakes the loop, once for all calls that a batch answers."""
        with self._lock:
            is_first = not self._answered
            self._answered.append(call)
        if is_first:
            self._wake(loop, self._deliver)

    def _wake(self, loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(callback, *arguments)

    def _deliver(self) -> None:
        while self._answered:
            call = self._answered.popleft()
            if call.answer.done():
                continue
            if call.error is not None:
                call.answer.set_exception(call.error)
            else:
                results = [request.future.result() for request in call.requests]
                call.answer.set_result((list(call.requests), results))


def _expire(call: _Call) -> None:
    if not call.answer.done():
        call.answer.set_exception(DeadlineExceededError(f"no result within {call.options.timeout_s:g} s"))
