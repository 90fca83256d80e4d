"""The engine for asyncio: preparing on a small pool of threads, results without a thread per caller."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import ImagePrompt, Prompt, TextPair
from anypool.engine.replicas import start_engine
from anypool.engine.request import Request, check_turn
from anypool.errors import DeadlineExceededError, EngineDeadError, EngineError, OverloadedError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask, parse_task

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

    def __post_init__(self) -> None:
        check_turn(self.priority, self.timeout_s)


# A call of fewer characters that comes alone is prepared on the event loop: handing it to a thread takes longer.
_TINY = 2048
# After so many turns of the loop without a call, with so many seconds between them, no more seem to come at once.
_QUIET_TURNS, _QUIET_S = 2, 0.001
# Calls of fewer characters are prepared together, larger ones by themselves.
SMALL = 16_384
# Of a text, as a rule: large calls that wait to be prepared may have as many as the queue's tokens have.
_CHARACTERS_PER_TOKEN = 4


@dataclass(eq=False)
class _Call:
    """One caller's prompts, from arrival to answer. `is_over` once nobody waits for the answer."""

    prepare: Callable[[], Sequence[Request]]
    options: ServingOptions
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Served]
    deadline: float | None
    size: int
    requests: Sequence[Request] = ()
    unfinished: int = 0
    is_over: bool = False


class AsyncEngine:
    """Serves many callers. Calls that arrive together are prepared and queued together.

    Args:
        engine: What runs them, or what to start one with.
        threads: Threads that prepare prompts, at least 2: one is kept for small calls. A call that is being prepared
            cannot be stopped, so this is also how many can be busy for callers that have gone.
    """

    def __init__(self, engine: Engine | EngineConfig, *, threads: int = 4) -> None:
        assert threads >= 2
        self.engine = engine if isinstance(engine, Engine) else start_engine(engine)
        self.num_threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="anypool-prepare")
        self._lock = threading.Lock()
        self._idle_threads = threads
        self._is_closed = False
        self._small: list[_Call] = []
        self._large: deque[_Call] = deque()
        self._large_size = 0  # of all that wait
        self._arriving = self._arrived = 0  # small calls: between arrival and queue, and all that ever came
        self._watched: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._quiet_turns = 0
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[_Call, BaseException | None]]] = {}

    async def run(
        self,
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt],
        task: PoolingTask | str,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_options: PromptOptions | None = None,
        options: ServingOptions | None = None,
    ) -> Served:
        """Runs prompts. Cancelling the awaiting task drops those that have not run.

        Args:
            prompts: As for `Engine.prepare`.
            task: What each gets, by name or as a `PoolingTask`.
            params: For all of them, or one per prompt.
            prompt_options: How prompts become token ids.
            options: How the call is served.

        Returns:
            The requests, and a result for each.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served; nothing has been run then.
            OverloadedError: The queue is full, or what waits to be prepared is too much.
            DeadlineExceededError: The time was up.
            EngineError: The engine failed on a prompt; the others are dropped.
        """
        prepare = functools.partial(self.engine.prepare, prompts, parse_task(task), params, prompt_options)
        return await self.serve(prepare, options, size=_size(prompts))

    async def serve(
        self, prepare: Callable[[], Sequence[Request]], options: ServingOptions | None = None, *, size: int = 0
    ) -> Served:
        """Runs the requests that `prepare` returns. Otherwise as `run`.

        Args:
            prepare: Called on a thread, or at once where it is known to be quick.
            options: How the call is served.
            size: About how many characters it has to read; 0 where that is not known.
        """
        options, loop = options or ServingOptions(), asyncio.get_running_loop()
        deadline = None if options.timeout_s is None else time.monotonic() + options.timeout_s
        call = _Call(prepare, options, loop, loop.create_future(), deadline, size)
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine is shut down")
            if size < SMALL:
                self._small.append(call)
                self._arriving, self._arrived = self._arriving + 1, self._arrived + 1
            else:
                self._add_large(call)
        timer = None if options.timeout_s is None else loop.call_later(options.timeout_s, _expire, call)
        loop.call_soon(self._dispatch)  # after all others that are ready in this turn of the loop
        try:
            return await call.answer
        finally:
            call.is_over = True
            if timer is not None:
                timer.cancel()
            for request in call.requests:  # after an error, or when the caller is gone, nobody wants the rest
                request.future.cancel()

    def _add_large(self, call: _Call) -> None:
        waiting, most = self._large_size, _CHARACTERS_PER_TOKEN * self.engine.config.max_queued_tokens
        if call.options.bounded and waiting > 0 and waiting + call.size > most:
            self.engine.metrics.refused()
            raise OverloadedError(f"{waiting:,} characters wait to be prepared, of at most {most:,}: try again later")
        self._large_size += call.size
        self._large.append(call)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Stops the engine; queued calls get `drain_s` seconds to be answered, the rest an error."""
        await asyncio.to_thread(self.engine.close, drain_s=drain_s)
        with self._lock:
            self._is_closed = True
            self._pool.shutdown(wait=False)
            waiting, self._small, self._large = [*self._small, *self._large], [], deque()
        for call in waiting:
            self._answer(call, EngineDeadError("the engine is shut down"))

    def _dispatch(self) -> None:
        """Hands what has arrived to idle threads, and prepares a tiny call here where it came alone."""
        with self._lock:
            is_alone = len(self._small) == 1 and 0 < self._small[0].size < _TINY and not self._is_closed
            alone = [self._small.pop()] if is_alone else []
            while not self._is_closed and self._idle_threads and (calls := self._next(large=self._idle_threads > 1)):
                self._idle_threads -= 1
                self._pool.submit(self._work, calls)
        if alone:
            self._prepare_and_submit(alone)

    def _work(self, calls: Sequence[_Call]) -> None:
        """On a thread: prepares calls, then queues them all, so that they can share a batch."""
        while calls:
            self._prepare_and_submit(calls)
            with self._lock:
                calls = self._next(large=self._idle_threads > 0)
                self._idle_threads += not calls

    def _prepare_and_submit(self, calls: Sequence[_Call]) -> None:
        ready = [call for call in calls if not call.is_over and self._prepare(call)]
        with self.engine.together():
            for call in ready:
                try:
                    self._submit(call)
                except Exception as error:  # the caller's, whatever it is
                    self._answer(call, error)
        with self._lock:
            self._arriving -= sum(call.size < SMALL for call in calls)

    def _next(self, *, large: bool) -> Sequence[_Call]:
        """What a thread should prepare: all small calls, or one large call if it may be one."""
        if self._small:
            calls, self._small = self._small, []
            return calls
        if not (self._large and large):
            return ()
        call = self._large.popleft()
        self._large_size -= call.size
        return [call]

    def _prepare(self, call: _Call) -> bool:
        try:
            call.requests = call.prepare()
        except BaseException as error:  # the caller's, whatever it is
            self._answer(call, _raisable(error))
            return False
        return True

    def _submit(self, call: _Call) -> None:
        call.unfinished = len(call.requests)
        if not call.requests:
            self._answer(call)
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
            request.future.add_done_callback(functools.partial(self._count_down, call))
        if call.is_over:  # the caller has gone meanwhile
            for request in call.requests:
                request.future.cancel()

    def _count_down(self, call: _Call, future: Future[torch.Tensor]) -> None:
        """A request has its answer: on the device thread, or at once where it had it before."""
        if call.is_over:
            return
        with self._lock:
            call.unfinished -= 1
            is_last = call.unfinished == 0
        error = CancelledError("a request was cancelled") if future.cancelled() else future.exception()
        if error is not None or is_last:
            self.engine.expect_again()
            self._answer(call, error)

    def _answer(self, call: _Call, error: BaseException | None = None) -> None:
        """Gives a call its results or its error, from any thread.

        The loop is woken once for all that are given meanwhile: those of a batch come together, and what their callers
        ask for next comes together too.
        """
        with self._lock:
            answers = self._answers.setdefault(call.loop, [])
            answers.append((call, error))
            if len(answers) > 1:
                return
        try:
            call.loop.call_soon_threadsafe(self._deliver, call.loop)
        except RuntimeError:  # the loop is closed: nobody waits there
            with self._lock:
                self._answers.pop(call.loop, None)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            answers = self._answers.pop(loop, [])
        for call, error in answers:
            if call.answer.done():
                continue
            if error is not None:
                call.answer.set_exception(error)
            else:
                call.answer.set_result((list(call.requests), [request.future.result() for request in call.requests]))
        self._quiet_turns = 0
        if loop not in self._watched:
            self._watched.add(loop)
            loop.call_later(_QUIET_S, self._watch, loop, self._arrived)

    def _watch(self, loop: asyncio.AbstractEventLoop, arrived: int) -> None:
        """Tells the engine when no more of the callers who have just been answered seem to ask again at once.

        A turn of the loop may take in many requests without one having become a call, so one quiet turn is not enough.
        """
        is_quiet = arrived == self._arrived and not self._arriving
        self._quiet_turns = self._quiet_turns + 1 if is_quiet else 0
        if self._quiet_turns < _QUIET_TURNS:
            loop.call_later(_QUIET_S, self._watch, loop, self._arrived)
            return
        self._watched.discard(loop)
        self.engine.expect_no_more()


def _raisable(error: BaseException) -> Exception:
    """The error, or one in its place where raising it in a coroutine would do more: SystemExit ends the whole loop."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    failure = EngineError(f"preparing the prompts raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _size(prompts: object) -> int:
    """About how many characters there are to read."""
    if not isinstance(prompts, (list, tuple)):
        return 0  # an error, or a sequence of the caller's own
    return sum(map(_size_of, prompts))


def _size_of(prompt: object) -> int:
    if isinstance(prompt, (str, list)):
        return len(prompt)
    has_images = isinstance(prompt, ImagePrompt) or (isinstance(prompt, Mapping) and "multi_modal_data" in prompt)
    return SMALL if has_images else SMALL // 64  # decoding an image takes long, and its prompt is short


def _expire(call: _Call) -> None:
    if not call.answer.done():
        call.answer.set_exception(DeadlineExceededError(f"no result within {call.options.timeout_s:g} s"))
