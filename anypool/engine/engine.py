"""The engine: submit -> plan -> tokenise -> schedule -> run -> resolve.

One thread owns the device. Whoever has prompts calls `prepare`, which checks, plans and tokenises all of them before
any is run, then `submit`, which queues them and returns; each request's future becomes its result or its error.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from anypool.adapters.load import LoadedModel
from anypool.adapters.rerank_templates import TemplatedPrompt
from anypool.config import EngineConfig
from anypool.engine.admission import Admission
from anypool.engine.faults import deadline_error, model_error, non_finite_error
from anypool.engine.flight import Flight
from anypool.engine.gathering import Gathering
from anypool.engine.health import Health
from anypool.engine.known_adapters import KnownAdapters
from anypool.engine.lora import LoRAManager
from anypool.engine.metrics import EngineMetrics
from anypool.engine.pieces import LongPrompt, Piece
from anypool.engine.preparation import Preparation
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import Prompt, TextPair
from anypool.engine.request import Request, check_new, check_turn, leaves
from anypool.engine.scheduler import Scheduler
from anypool.engine.setup import read_adapters
from anypool.engine.start import start
from anypool.engine.tokenization import Tokenizer
from anypool.errors import EngineDeadError
from anypool.model_executor.cpu import KeptMemory
from anypool.model_executor.cpu_shares import computes_on_all_cores
from anypool.model_executor.faults import forget_tensors, is_out_of_memory, is_peers_failure, is_sticky
from anypool.model_executor.pooling_model_runner import RunnerOutput
from anypool.model_executor.transfers import make_current
from anypool.model_executor.weights.lora import PeftAdapter
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)

# A budget that runs out of memory is halved, but not below this: then it is the model that is too large.
_LEAST_TOKENS = 64
# Seconds until the device thread of an engine whose ranks have died is given up.
_LAST_WAIT_S = 5.0
# Seconds that a thread has to end which waited for processes that have just been ended by force.
_LAST_LOOK_S = 1.0


class Engine:
    """A loaded model and the thread that runs it.

    Args:
        config: What to load and how.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.data_parallel_size == 1, "start_engine starts replicas"
        started = start(config)
        lora = started.loaded.lora
        adapters = None if lora is None else LoRAManager(lora, cache_dir=config.download_dir)
        self._set_up(started.config, started.tokenizer, started.loaded, adapters)
        self._cache, self._executor = started.cache, started.executor
        self._memory = KeptMemory(self.loaded.device)
        is_shared = self.loaded.device.type == "cpu" and self._executor.depth == 1 and computes_on_all_cores()
        self._gathering = Gathering(is_on=is_shared)
        self._executor.watch(self._wake, self._die)
        if adapters is not None:
            adapters.on_put = self._put_adapter
            try:
                read_adapters(config, adapters)
            except BaseException:
                self._executor.kill()
                raise
        self._adapters = adapters
        self._start()

    def _set_up(
        self, config: EngineConfig, tokenizer: Tokenizer | None, loaded: LoadedModel, adapters: KnownAdapters | None
    ) -> None:
        """Makes what takes and queues requests, whoever runs them."""
        assert config.max_model_len is not None and config.max_num_batched_tokens is not None
        self.config, self.tokenizer, self.loaded = config, tokenizer, loaded
        self.max_model_len = config.max_model_len
        self.metrics = EngineMetrics()
        self.lora = adapters
        self._preparation = Preparation(loaded, tokenizer, self.max_model_len, self.lora)
        self._scheduler = Scheduler(max_tokens=config.max_num_batched_tokens, max_seqs=config.max_num_seqs)
        self._admission = Admission(self._scheduler)
        self._gathering = Gathering(is_on=False)
        self._flights: deque[Flight] = deque()
        self._again: deque[Sequence[Request]] = deque()  # what is left of batches that failed, before all that waits
        self._long: LongPrompt | None = None  # whose next chunk waits
        self._running: Sequence[Request] = ()  # all that are in flight
        self._changed = threading.Condition()
        self._holding = 0
        self._next_sweep = 0.0
        self._stop_at: float | None = None
        self._death: BaseException | None = None
        self._beat = time.monotonic()
        self._process = os.getpid()

    def _start(self) -> None:
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

    @property
    def is_left_behind(self) -> bool:
        """Whether this is a forked copy: its thread, its locks and its processes are the parent's."""
        return os.getpid() != self._process

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
            replicas=int(self.is_alive),
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
            EngineDeadError: The process was forked from the one that has the engine.
        """
        if self.is_left_behind:
            raise EngineDeadError(
                f"process {os.getpid()} was forked from process {self._process}, and the engine stayed there: make it "
                "in the process that uses it, or start processes with multiprocessing.get_context('spawn')"
            )
        began = time.perf_counter()
        requests = self._preparation.prepare(prompts, task, params, options or PromptOptions())
        self.metrics.prepare_s.observe(time.perf_counter() - began)
        return requests

    def offsets(self, prompt: Prompt, request: Request, options: PromptOptions) -> list[tuple[int, int]] | None:
        """Where a request's tokens stand in the text it came from; None where it came from token ids."""
        return self._preparation.offsets(prompt, request, options)

    def kept_places(self, ids: list[int], options: PromptOptions) -> Sequence[int]:
        """Which of a text's token ids, special ones included, are left where these options cut it."""
        return self._preparation.kept_places(ids, options)

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
        if bounded and self._admission.refusal(tokens, priority, self.config):
            self._sweep()
        with self._changed:
            if not self.is_alive:
                raise EngineDeadError(self._end_message())
            if bounded and (refusal := self._admission.refusal(tokens, priority, self.config)):
                self.metrics.refused()
                raise refusal
            check_new(requests)
            for request in requests:
                request.priority, request.cache_salt, request.submitted = priority, cache_salt, now
                request.deadline = None if timeout_s is None else now + timeout_s
            self.metrics.submitted(requests)
            self._scheduler.add(requests)
            self._gathering.came()
            if not self._holding:
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

    def expect_again(self) -> None:
        """Says, on the device thread, that a caller gets its answer and may ask again at once: the next batch waits."""
        with self._changed:
            self._gathering.answered()

    def expect_no_more(self) -> None:
        """Says that no more calls seem to come at once: the next batch may begin."""
        with self._changed:
            self._gathering.end()
            self._changed.notify()

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
            self._run()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._death = self._death or error
            logger.exception("the device thread died")
        finally:
            self._fail_waiting()
            self._let_go()

    def _run(self) -> None:
        make_current(self.loaded.device)
        while self._step():
            self._memory.trim()

    def _let_go(self) -> None:
        """Ends what runs batches, on the device thread."""
        self._executor.close()

    def _kill(self) -> None:
        """Ends it by force, from any thread."""
        self._executor.kill()

    def _step(self) -> bool:
        """Launches a batch or collects one, and waits until either can be done; False when the engine stops."""
        turn = self._next()
        if turn is None:
            return False
        if isinstance(turn, Flight):
            self._collect(turn)
        else:
            self._turn(turn)
        self._running = [request for flight in self._flights for request in flight.requests]
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _die(self, error: EngineDeadError) -> None:
        """Answers everybody, whatever the device thread is at: there is nothing to run anything on any more."""
        self._death = self._death or error
        logger.error("%s", error)
        self._fail_waiting()
        self._wake()

    def _next(self) -> Flight | Sequence[Request] | None:
        """The oldest batch in flight if its results are there, else requests to launch; None when the engine stops.

        Where neither is to be had, whichever comes first.
        """
        with self._changed:
            while self._death is None:
                oldest = self._flights[0] if self._flights else None
                if oldest is not None and oldest.is_done:
                    return oldest
                wait_s = self._gathering.wait_s(is_full=self._scheduler.waiting_tokens >= self._scheduler.max_tokens)
                if len(self._flights) < self._executor.depth and not wait_s and (requests := self._take()):
                    self._gathering.batch_began()
                    self._running = [*self._running, *requests]
                    return requests
                if oldest is None:
                    self._beat = time.monotonic()
                    if self._stop_at is not None:
                        return None
                elif not self._executor.calls_back:
                    return oldest
                self._changed.wait(wait_s or None)
            return None

    def _take(self) -> Sequence[Request]:
        """Takes the requests whose turn it is."""
        if self._again:
            return self._again.popleft()
        # After a stop nothing is added any more to what waits for the end of `together`.
        may_run = not self._holding if self._stop_at is None else time.monotonic() < self._stop_at
        return self._scheduler.next_batch() if may_run else ()

    def _turn(self, requests: Sequence[Request]) -> None:
        """Launches requests whose turn it is; those that nobody waits for any more are dropped."""
        now = time.monotonic()
        gone = [request for request in requests if request.is_gone(now)]
        if self._long is not None and self._long.request in gone:
            self._end_long(self._long)
        self._drop(gone)
        due = [request for request in requests if request not in gone] if gone else requests
        self.metrics.started([request for request in due if not request.started], now)
        is_long = len(due) == 1 and len(due[0]) > self._scheduler.max_tokens and due[0].num_keys is None
        if not due:
            return
        first, *rest = [due] if self._adapters is None else self._adapters.batches(due)
        self._again.extendleft(reversed(rest))
        self._launch(first, in_chunks=is_long and bool(self.config.enable_chunked_prefill))

    def _launch(self, requests: Sequence[Request], *, in_chunks: bool) -> None:
        """Launches whole prompts, or the next chunk of a long one, and queues what is left of that."""
        self._beat = time.monotonic()
        if in_chunks and self._long is None:
            self._make_room(requests[0])
        flight = Flight(requests, self._scheduler.max_tokens, self._beat, bool(self._scheduler), in_chunks)
        try:
            if self._cache is not None and in_chunks:
                self._long = flight.long = self._long or self._cache.begin(requests[0])
            adapters = () if self._adapters is None else self._adapters.place(requests)
            work = flight.plan(self._cache, pad_token_id=self.loaded.config.pad_token_id, adapters=adapters)
            flight.in_flight = self._executor.launch(work)
        except Exception as error:  # anything a model may raise; it goes to the request that caused it
            failure = error
        else:
            self._flights.append(flight)
            if flight.long is not None:
                self._put_back_rest(flight.long, flight.pieces[0])
            return
        self._failed(flight, failure)

    def _put_adapter(self, slot: int, adapter: PeftAdapter) -> None:
        self.metrics.adapter_loads += 1
        self._executor.put_adapter(slot, adapter)

    def _make_room(self, request: Request) -> None:
        """Waits until the blocks of batches in flight leave enough for a long prompt."""
        while self._flights and self._cache is not None and not self._cache.has_room(request):
            self._collect(self._flights[0])

    def _put_back_rest(self, long: LongPrompt, piece: Piece) -> None:
        """Queues the next chunk, which may be launched before this one has ended: they run in order."""
        long.done = piece.stop
        if piece.is_last:
            self._long = None
            return
        with self._changed:
            self._scheduler.put_back(long.request, len(piece))

    def _collect(self, flight: Flight) -> None:
        """Waits for the oldest batch in flight, and gives its results to those who wait for them."""
        self._beat = time.monotonic()
        assert flight.in_flight is not None
        try:
            output = flight.in_flight.result()
        except Exception as error:  # as in `_launch`
            failure = error
        else:
            self._flights.popleft()
            self._ran(flight, output)
            return
        self._flights.popleft()
        self._failed(flight, failure)

    def _ran(self, flight: Flight, output: RunnerOutput) -> None:
        pieces, ended = flight.pieces, time.monotonic()
        self.metrics.ran(pieces, output, budget=flight.budget)
        self._admission.ran(sum(map(len, pieces)), began=flight.began, ended=ended, is_full=flight.leaves_others)
        with self._changed:
            self._gathering.batch_ended(ended - flight.began)
        if flight.long is None:
            for index, piece in enumerate(pieces):
                self._finish(piece, output, index)
        elif pieces[0].is_last and not flight.long.is_over:
            self._finish(flight.long.whole, output, 0)

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

    def _failed(self, flight: Flight, error: Exception) -> None:
        """Has a failed batch run in halves, a lone request once more where memory was short, or fails it."""
        is_innocent = is_peers_failure(error)
        self.metrics.failed_batches += not is_innocent
        if is_sticky(error) or isinstance(error, EngineDeadError):
            raise error  # there is nothing to run anything on: end, with an error for everybody who waits
        forget_tensors(error)
        if flight.long is None:
            for piece in flight.pieces:
                self._give_back(piece, keep=False)
        elif flight.long.is_over:
            return
        else:
            self._end_long(flight.long)  # if the prompt is run again, it starts over
        if is_innocent:  # it was on its way when another batch failed
            self._start_over(flight)
            return
        if is_out_of_memory(error):
            self._shrink(flight)
        if len(flight.requests) > 1:
            logger.warning("a batch of %d raised %s; running it in halves", len(flight.requests), type(error).__name__)
            middle = len(flight.requests) // 2
            self._again.extendleft((flight.requests[middle:], flight.requests[:middle]))
            return
        [request] = flight.requests
        if is_out_of_memory(error) and not request.ran_out_of_memory:
            # Smaller chunks may fit where this did not. If they are as small as they get, one more try has to do.
            can_shrink = self.config.enable_chunked_prefill and flight.tokens > self._scheduler.max_tokens
            request.ran_out_of_memory = not can_shrink
            with self._changed:
                self._scheduler.put_back(request, 0)
            return
        self.metrics.ended(request, "error")
        request.fail(model_error(request, error))

    def _start_over(self, flight: Flight) -> None:
        if not flight.in_chunks:
            self._again.append(flight.requests)
            return
        with self._changed:
            self._scheduler.put_back(flight.requests[0], 0)

    def _shrink(self, flight: Flight) -> None:
        """Halves the token budget, for good: what did not fit once will not fit the next time.

        A prompt that is run whole though it is longer than the budget says nothing about batches within it.
        """
        self.metrics.out_of_memory += 1
        self._executor.free_memory()
        budget = self._scheduler.max_tokens
        smaller = max(_LEAST_TOKENS, flight.tokens // 2)
        if smaller >= budget or flight.tokens > budget:
            return
        with self._changed:
            self._scheduler.max_tokens = smaller
        logger.warning("out of memory: batches have at most %d tokens from now on", smaller)

    def _give_back(self, piece: Piece, *, keep: bool) -> None:
        if self._cache is not None:
            self._cache.give_back(piece, keep=keep)

    def _end_long(self, long: LongPrompt) -> None:
        """Gives up a prompt in chunks. Those in flight may run on: what is launched later runs after them."""
        long.is_over = True
        if self._long in (None, long):
            self._long = None
            self._executor.forget_chunks()
        with self._changed:
            self._scheduler.take_back(long.request)
        self._give_back(long.whole, keep=False)

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
        if isinstance(self._death, EngineDeadError):  # the thread may wait for a process that is no more
            timeout_s = min(timeout_s, _LAST_WAIT_S)
        self._thread.join(min(drain_s + timeout_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            self._kill()
            logger.error("the device thread has not ended within %.0f s and is given up", drain_s + timeout_s)
            self._death = self._death or EngineDeadError("the engine is shut down")  # it waits for nothing any more
            self._fail_waiting()
            self._wake()
            self._thread.join(_LAST_LOOK_S)

    def _fail_waiting(self) -> None:
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic()
            waiting = self._scheduler.drain()
            again = [request for requests in self._again for request in requests]
        error = EngineDeadError(self._end_message())
        for request in (*waiting, *again, *self._running):
            request.fail(error)

    def _end_message(self) -> str:
        if isinstance(self._death, EngineDeadError):
            return str(self._death)
        return "the engine is shut down" if self._death is None else f"the device thread died: {self._death!r}"


def _close(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None and not alive.is_left_behind:
        alive.close()
