"""The engine: submit -> plan -> tokenise -> schedule -> run -> resolve.

One thread owns the device. Whoever has prompts calls `prepare`, which checks, plans and tokenises all of them before
any is run, then `submit`, which queues them and returns; each request's future becomes its result or its error.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch

from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import EngineConfig
from anypool.engine.batch import make_batch
from anypool.engine.faults import deadline_error, forget_tensors, model_error, non_finite_error
from anypool.engine.health import Health
from anypool.engine.metrics import EngineMetrics
from anypool.engine.pieces import LongPrompt, Piece
from anypool.engine.preparation import Preparation, PromptOptions
from anypool.engine.prompts import Prompt, TextPair
from anypool.engine.request import Request, check_new, check_turn, leaves
from anypool.engine.scheduler import Scheduler
from anypool.engine.setup import load, make_cache, plan_gpu_memory, read_adapters, resolve
from anypool.errors import EngineDeadError, OverloadedError
from anypool.model_executor.cpu import give_freed_memory_back, keep_freed_memory, run_apart, set_up_threads
from anypool.model_executor.faults import is_out_of_memory, is_sticky
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import PoolingModelRunner, RunnerOutput
from anypool.model_executor.transfers import make_current
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)

# A budget that runs out of memory is halved, but not below this: then it is the model that is too large.
_LEAST_TOKENS = 64
# Seconds after which memory that is kept for the next layer is given back once. It takes about 20 ms.
_KEPT_MEMORY_S = 5.0


class Engine:
    """A loaded model and the thread that runs it.

    Args:
        config: What to load and how.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        set_up_threads()
        self.tokenizer, self.loaded = run_apart(partial(load, config))
        self._keeps_memory = self.loaded.device.type == "cpu" and keep_freed_memory()
        self.config = resolve(config, self.loaded, self.tokenizer)
        assert self.config.max_model_len is not None and self.config.max_num_batched_tokens is not None
        self.max_model_len = self.config.max_model_len
        self.metrics = EngineMetrics()
        self.lora = read_adapters(self.config, self.loaded)
        self._preparation = Preparation(self.loaded, self.tokenizer, self.max_model_len, self.lora)
        self._scheduler = Scheduler(max_tokens=self.config.max_num_batched_tokens, max_seqs=self.config.max_num_seqs)
        self._runner = PoolingModelRunner(
            self.loaded.model,
            self.loaded.device,
            enforce_eager=self.config.enforce_eager,
            lora=None if self.loaded.lora is None else self.loaded.lora.slots,
        )
        self._cache = make_cache(self.config, self.loaded)
        if self.loaded.device.type == "cuda":
            plan_gpu_memory(self.config, self.loaded, self._cache, graphs=self._runner.graphs is not None)
        self._long: LongPrompt | None = None
        self._running: Sequence[Request] = ()
        self._changed = threading.Condition()
        self._holding = 0
        self._next_sweep = 0.0
        self._stop_at: float | None = None
        self._death: BaseException | None = None
        self._beat = time.monotonic()
        self._trimmed = self._beat
        self._tokens_per_s = 0.0  # of batches that left others waiting: those were as full as they get
        self._leaves_others = False
        self._thread = threading.Thread(target=self._serve, name="anypool-device", daemon=True)
        self._thread.start()
        atexit.register(_close, weakref.ref(self))

    @property
    def supported_tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks that the loaded model serves."""
        return self.loaded.defaults.tasks

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and self._stop_at is None

    def health(self) -> Health:
        """What the device thread is doing. Asks nothing of it, so it answers while the thread is busy or stuck."""
        # In this order, since all three move on meanwhile: the other way round a batch that begins now looks old.
        running, beat = len(self._running), self._beat
        age_s = time.monotonic() - beat
        status: Literal["alive", "busy", "stuck", "dead"] = "busy" if running else "alive"
        message = ""
        if not self.is_alive:
            status, message = "dead", self._end_message()
        elif running and age_s > self.config.stuck_after_s:
            status, message = "stuck", f"a batch of {running} has been running for {age_s:.0f} s"
        return Health(
            status=status,
            age_s=age_s,
            waiting_requests=len(self._scheduler),
            waiting_tokens=self._scheduler.waiting_tokens,
            message=message,
        )

    # 1. Check, plan, tokenise.

    def prepare(
        self,
        prompts: Sequence[Prompt | TextPair | TemplatedPrompt],
        task: PoolingTask | Sequence[PoolingTask],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        options: PromptOptions | None = None,
    ) -> list[Request]:
        """Turns prompts into requests. Nothing is queued, so an error costs no other prompt anything.

        Args:
            prompts: Texts, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`; for scores also pairs.
            task: What each gets. Of several tasks the results are those of `Request.also`, in their order: each prompt
                is run once.
            params: For all of them, or one per prompt.
            options: How prompts become token ids.

        Raises:
            InvalidRequestError: A prompt or a parameter cannot be served; the message names it.
        """
        began = time.perf_counter()
        requests = self._preparation.prepare(prompts, task, params, options or PromptOptions())
        self.metrics.prepare_s.observe(time.perf_counter() - began)
        return requests

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Where a request's tokens stand in the text it came from; None where it came from token ids."""
        return self._preparation.offsets(prompt, request, options)

    def prompt_text(self, options: PromptOptions) -> str:
        """The text that these options put before each input."""
        return self._preparation.prompt_text(options)

    # 2. Queue.

    def submit(
        self,
        requests: Sequence[Request],
        *,
        bounded: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queues requests; their futures become results or errors.

        Args:
            requests: From `prepare`. Those of one call share the device fairly with those of other calls.
            bounded: Whether a full queue refuses them, as a server's does.
            priority: Smaller ones run earlier; 0 is usual.
            timeout_s: Seconds after which they are dropped with an error if they have not run.
            cache_salt: Share cached prefixes only with requests of the same salt.

        Raises:
            InvalidRequestError: A setting is out of its range, or a request was queued before.
            OverloadedError: The queue is full.
            EngineDeadError: The engine is closed or its thread has died.
        """
        check_turn(priority, timeout_s)
        now = time.monotonic()
        requests = [request for request in leaves(requests) if not request.is_answered]
        tokens = sum(map(len, requests))
        if bounded and self._refusal(tokens, priority):
            self._sweep()
        with self._changed:
            if not self.is_alive:
                raise EngineDeadError(self._end_message())
            if bounded and (refusal := self._refusal(tokens, priority)):
                self.metrics.refused()
                raise refusal
            check_new(requests)
            for request in requests:
                request.priority, request.cache_salt, request.submitted = priority, cache_salt, now
                request.deadline = None if timeout_s is None else now + timeout_s
            self.metrics.submitted(requests)
            self._scheduler.add(requests)
            self._changed.notify()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted inside waits for its end, so that it can share a batch. So does all else that is queued."""
        with self._changed:
            self._holding += 1
        try:
            yield
        finally:
            with self._changed:
                self._holding -= 1
                self._changed.notify()

    def _refusal(self, tokens: int, priority: int) -> OverloadedError | None:
        """Why the queue does not take so many more tokens, if it does not. An empty one takes any number."""
        waiting, config = self._scheduler.waiting_tokens, self.config
        if waiting and waiting + tokens > config.max_queued_tokens:
            message = (
                f"{waiting:,} tokens are waiting, and the queue takes {config.max_queued_tokens:,}: try again later"
            )
            return OverloadedError(message, retry_after_s=_retry_after(waiting / max(self._tokens_per_s, 1.0)))
        if self._tokens_per_s and config.max_queue_s is not None:
            wait_s = self._scheduler.tokens_before(tokens, priority) / self._tokens_per_s
            if wait_s > config.max_queue_s:
                message = f"the turn would come in {wait_s:,.1f} s, and the limit is {config.max_queue_s:g} s"
                return OverloadedError(
                    f"{message}: try again later", retry_after_s=_retry_after(wait_s - config.max_queue_s)
                )
        return None

    def _sweep(self) -> None:
        """Drops those that nobody waits for. It looks at the whole queue, so a twentieth of the time may go into it."""
        with self._changed:
            began = time.monotonic()
            if began < self._next_sweep:
                return
            gone = self._scheduler.take_gone()
            ended = time.monotonic()
            self._next_sweep = ended + 20 * (ended - began)
        self._drop(gone)  # callers' callbacks must not run under the lock

    # 3. Run, on the device thread.

    def _serve(self) -> None:
        try:
            make_current(self.loaded.device)
            while self._next():
                self._turn(self._running)
                self._running = ()
                self._trim_memory()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._death = error
            logger.exception("the device thread died")
        finally:
            self._fail_waiting()
            self._end_long()

    def _trim_memory(self) -> None:
        now = time.monotonic()
        if self._keeps_memory and now - self._trimmed >= _KEPT_MEMORY_S:
            self._trimmed = now
            give_freed_memory_back()

    def _next(self) -> bool:
        """Takes the next batch, waiting for one; False when the engine stops."""
        with self._changed:
            while True:
                self._beat = time.monotonic()
                if self._stop_at is not None and (not self._scheduler or self._beat >= self._stop_at):
                    return False
                may_run = not self._holding or self._stop_at is not None  # nothing is added to what waits at the end
                if may_run and (requests := self._scheduler.next_batch()):
                    self._running, self._leaves_others = requests, bool(self._scheduler)
                    return True
                self._changed.wait()

    def _turn(self, requests: Sequence[Request]) -> None:
        """Runs requests whose turn it is; those that nobody waits for any more are dropped."""
        now = time.monotonic()
        gone = [request for request in requests if request.is_gone(now)]
        if self._long is not None and self._long.request in gone:
            self._end_long()
        self._drop(gone)
        due = [request for request in requests if request not in gone] if gone else requests
        if self._long is None or self._long.request not in due:  # not for every chunk
            self.metrics.started(due, now)
        is_long = len(due) == 1 and len(due[0]) > self._scheduler.max_tokens and due[0].num_keys is None
        if is_long and self.config.enable_chunked_prefill:
            self._run_chunk(due[0])
        elif due:
            for batch in (due,) if self.lora is None else self.lora.batches(due):
                self._run(batch)

    def _run(self, requests: Sequence[Request]) -> None:
        """Runs whole prompts. A batch that raises is halved until the request that causes it stands alone."""
        self._beat = time.monotonic()
        pieces: list[Piece] = []
        try:
            pieces = self._pieces(requests)
            output = self._runner.run(
                self._batch(pieces),
                [request.plan for request in requests],
                [[one.plan for one in request.also] for request in requests],
            )
        except Exception as error:  # anything a model may raise; it goes to the request that caused it
            failure = error
        else:
            self._ran(pieces, output)
            for index, piece in enumerate(pieces):
                self._finish(piece, output, index)
            return
        for piece in pieces:
            self._give_back(piece, keep=False)
        self._failed(requests, failure, tokens=sum(map(len, requests)))

    def _run_chunk(self, request: Request) -> None:
        """Runs the next chunk of a prompt that is longer than the budget, and queues what is left of it."""
        assert self._cache is not None
        tokens = self._scheduler.max_tokens
        try:
            if self._long is None:
                self._long = self._cache.begin(request)
            long = self._long
            assert long.request is request, "one long prompt at a time"
            piece = long.next_piece(tokens)
            batch = self._batch([piece])
            if long.pooling is None:
                plans = [one.plan for one in (request, *request.also)]
                long.pooling = self._runner.begin_chunks(batch, plans)
            output = self._runner.run_chunk(batch, long.pooling, is_last=piece.is_last)
        except Exception as error:  # as in `_run`
            failure = error
        else:
            self._ran([piece], output)
            long.done = piece.stop
            if piece.is_last:
                self._long = None
                self._finish(long.whole, output, 0)
            else:
                with self._changed:
                    self._scheduler.put_back(request, len(piece))
            return
        self._end_long()  # if the prompt is run again, it starts over
        self._failed([request], failure, tokens=tokens)

    def _pieces(self, requests: Sequence[Request]) -> list[Piece]:
        if self._cache is None:
            return [Piece(request, len(request)) for request in requests]
        return self._cache.whole(requests)

    def _batch(self, pieces: Sequence[Piece]) -> PackedBatch:
        pad_token_id = self.loaded.config.pad_token_id
        adapters = () if self.lora is None else self.lora.place([piece.request for piece in pieces])
        return make_batch(pieces, torch.device("cpu"), pad_token_id=pad_token_id, cache=self._cache, adapters=adapters)

    def _ran(self, pieces: Sequence[Piece], output: RunnerOutput) -> None:
        tokens = sum(map(len, pieces))
        self.metrics.ran(pieces, output, budget=self._scheduler.max_tokens)
        if self._leaves_others:
            speed = tokens / max(output.forward_s + output.pool_s, 1e-6)
            self._tokens_per_s = 0.9 * self._tokens_per_s + 0.1 * speed if self._tokens_per_s else speed

    def _finish(self, piece: Piece, output: RunnerOutput, index: int) -> None:
        """Resolves the request of the piece at `index` of a batch.

        What it left in the cache may be read from now on, unless it was not finite.
        """
        request, is_finite = piece.request, output.are_finite[index]
        request.num_cached_tokens = piece.start
        if self._cache is not None and self._cache.shares_prefixes:
            self.metrics.looked_up_tokens += len(request)
            self.metrics.cached_tokens += piece.start
        self._give_back(piece, keep=is_finite)
        if is_finite:
            self.metrics.ended(request, "ok")
            request.resolve(output.results[index], output.others[index])
        else:
            self.metrics.ended(request, "nan")
            request.fail(non_finite_error(request))

    def _failed(self, requests: Sequence[Request], error: Exception, *, tokens: int) -> None:
        """Runs a failed batch in halves, a lone request once more where memory was short, or fails it."""
        self.metrics.failed_batches += 1
        if is_sticky(error):  # there is nothing to run anything on: end, with an error for everybody who waits
            raise error
        forget_tensors(error)
        if is_out_of_memory(error):
            self._shrink(tokens)
        if len(requests) > 1:
            logger.warning("a batch of %d raised %s; running it in halves", len(requests), type(error).__name__)
            middle = len(requests) // 2
            self._run(requests[:middle])
            self._run(requests[middle:])
            return
        [request] = requests
        if is_out_of_memory(error) and not request.ran_out_of_memory:
            # Smaller chunks may fit where this did not. If they are as small as they get, one more try has to do.
            can_shrink = self.config.enable_chunked_prefill and tokens > self._scheduler.max_tokens
            request.ran_out_of_memory = not can_shrink
            with self._changed:
                self._scheduler.put_back(request, 0)
            return
        self.metrics.ended(request, "error")
        request.fail(model_error(request, error))

    def _shrink(self, tokens: int) -> None:
        """Halves the token budget, for good: what did not fit once will not fit the next time.

        A prompt that is run whole though it is longer than the budget says nothing about batches within it.
        """
        self.metrics.out_of_memory += 1
        if self.loaded.device.type == "cuda":
            self._runner.free_graphs()
            torch.cuda.empty_cache()
        budget = self._scheduler.max_tokens
        smaller = max(_LEAST_TOKENS, tokens // 2)
        if smaller >= budget or tokens > budget:
            return
        with self._changed:
            self._scheduler.max_tokens = smaller
        logger.warning("out of memory: batches have at most %d tokens from now on", smaller)

    def _give_back(self, piece: Piece, *, keep: bool) -> None:
        if self._cache is not None:
            self._cache.give_back(piece, keep=keep)

    def _end_long(self) -> None:
        if self._long is not None:
            self._give_back(self._long.whole, keep=False)
            self._long = None

    def _drop(self, gone: Collection[Request]) -> None:
        """Answers requests that nobody waits for any more."""
        for request in gone:
            self.metrics.ended(request, "cancelled" if request.future.cancelled() else "expired")
            request.fail(deadline_error(request))

    # 4. End.

    def close(self, *, drain_s: float = 0.0, timeout_s: float = 60.0) -> None:
        """Stops the engine. What runs is finished, what waits gets `drain_s` to be run, the rest gets an error.

        Args:
            drain_s: Seconds that queued requests get; new ones are refused meanwhile.
            timeout_s: Seconds after that until the running batch is given up as well.
        """
        with self._changed:
            stop_at = time.monotonic() + drain_s
            self._stop_at = stop_at if self._stop_at is None else min(stop_at, self._stop_at)
            self._changed.notify()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(min(drain_s + timeout_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            logger.error("the device thread has not ended within %.0f s and is given up", drain_s + timeout_s)
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic()
            waiting = self._scheduler.drain()
        error = EngineDeadError(self._end_message())
        for request in (*waiting, *self._running):
            request.fail(error)

    def _end_message(self) -> str:
        return "the engine is shut down" if self._death is None else f"the device thread died: {self._death!r}"


def _retry_after(seconds: float) -> float:
    return min(600.0, max(1.0, seconds))


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
