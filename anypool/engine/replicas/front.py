"""The front of several engines: one queue, from which each takes what it can run."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

from anypool.adapters.heads import registered_heads
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.engine.faults import outcome_of, replica_error
from anypool.engine.health import Health
from anypool.engine.known_adapters import KnownAdapter
from anypool.engine.replicas.adapters import FrontAdapters
from anypool.engine.replicas.places import Place, places
from anypool.engine.replicas.process import ReplicaProcess
from anypool.engine.replicas.replica import Replica
from anypool.engine.replicas.wire import Report, Setup, unpack_error, unpack_results
from anypool.engine.request import Request
from anypool.engine.setup import read_adapters
from anypool.errors import EngineDeadError, EngineError
from anypool.model_executor.registry import ModelRegistry
from anypool.model_executor.weights.repository import Repository

logger = logging.getLogger(__name__)


def start_engine(config: EngineConfig) -> Engine:
    """An engine in this process, or replicas where the configuration asks for some.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint or this machine.
    """
    return Engine(config) if config.data_parallel_size == 1 else Replicas(config)


class Replicas(Engine):
    """Engines in processes of their own that share a queue. This process prepares prompts and has no weights.

    A batch goes to the replica with the fewest tokens to run, as soon as it has room for a second one, so that none
    waits for its next. What waits is divided among all of them: no replica is idle while another has a long batch.

    A replica that dies is started again. What it had to run is run once more, each request by itself, so that one that
    kills replicas takes no other with it; the second time is its last.

    Args:
        config: What to load and how, `data_parallel_size` times.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run.
        ConfigError: A setting contradicts the checkpoint or this machine.
        EngineDeadError: A replica died while it was loading.
    """

    def __init__(self, config: EngineConfig) -> None:
        starts = [_Start(config, place) for place in places(config, gpus_each=config.num_ranks)]
        # Fetches it where it is on the hub, once for all.
        Repository.open(config.model, revision=config.revision, cache_dir=config.download_dir)
        processes: list[ReplicaProcess] = []
        try:
            for start in starts:
                processes.append(start(is_first=not processes))
            first, *_ = [process.wait_until_ready() for process in processes]
            assert first.loaded is not None
            resolved = first.config.replace(
                data_parallel_size=config.data_parallel_size,
                lora_modules=config.lora_modules,
                use_tqdm_on_load=config.use_tqdm_on_load,
                kv_cache_memory_fraction=config.kv_cache_memory_fraction,
            )
            adapters, tasks = None, tuple(dict.fromkeys(first.loaded.recipe.tasks.values()))
            if tasks or config.enable_lora:
                how = {"cache_dir": config.download_dir, "tasks": tasks, "takes_more": config.enable_lora}
                adapters = FrontAdapters(self._check_adapter, **how)
            self._set_up(resolved, first.tokenizer, first.loaded, adapters)
        except BaseException:
            for process in processes:
                process.kill()
            for process in processes:
                process.end()
            raise
        self._retried: deque[Request] = deque()
        self._takes_back = True  # whether what a replica had is run once more
        self._replicas = [
            Replica(process.name, process, start, self, self._changed)
            for process, start in zip(processes, starts, strict=True)
        ]
        for replica in self._replicas:
            replica.start()
        self._start()
        if adapters is not None:
            try:
                read_adapters(config, adapters)
            except BaseException:
                self.close()
                raise

    def health(self) -> Health:
        """What the replicas are doing. Asks nothing of them, so it answers while they are busy or stuck."""
        ready = [replica for replica in self._replicas if replica.is_ready]
        stuck = [replica for replica in ready if replica.is_stuck]
        working = len(ready) - len(stuck)
        status: Literal["alive", "busy", "stuck", "dead"] = "busy" if self._in_flight() else "alive"
        message = ""
        if not self.is_alive:
            status, message = "dead", self._end_message()
        elif working < len(self._replicas):
            status = "stuck" if stuck and not working else status
            given_up = sum(replica.is_given_up for replica in self._replicas)
            away = len(self._replicas) - len(ready) - given_up
            message = (
                f"{working} of {len(self._replicas)} replicas work: {len(stuck)} hang, {away} are to be restarted, "
                f"{given_up} are given up"
            )
        return Health(
            status=status,
            age_s=time.monotonic() - self._beat,
            waiting_requests=len(self._scheduler) + len(self._retried),
            waiting_tokens=self._scheduler.waiting_tokens,
            message=message,
            replicas=working if self.is_alive else 0,
        )

    def _check_adapter(self, adapter: KnownAdapter) -> None:
        """Has a replica read an adapter; the others do so when a request names it.

        Raises:
            ModelLoadError: It cannot be found or read, or does not fit the model.
            EngineError: No replica answers.
        """
        with self._changed:
            ready = [replica for replica in self._replicas if replica.is_ready]
            target = min(ready, key=lambda one: one.tokens, default=None)
            asked = None if target is None else target.ask(adapter)
        if target is None or asked is None:
            raise EngineError(f"no replica is ready to read the adapter {adapter.request.lora_name!r}: try again")
        try:
            asked.result(self.config.stuck_after_s)
        except FutureTimeout:
            raise EngineError(
                f"{target.name} has not read the adapter {adapter.request.lora_name!r} within "
                f"{self.config.stuck_after_s:g} s: try again"
            ) from None

    def _in_flight(self) -> int:
        return sum(len(replica.in_flight) for replica in self._replicas)

    # Batches to replicas, on this process's device thread.

    def _run(self) -> None:
        while (picked := self._wait_for_batch()) is not None:
            self._hand_over(*picked)

    def _wait_for_batch(self) -> tuple[Replica, Sequence[Request]] | None:
        """The next batch and who is to run it, waiting for either; None when the engine stops."""
        with self._changed:
            while True:
                self._beat = now = time.monotonic()
                if all(replica.is_given_up for replica in self._replicas):
                    raise EngineDeadError(f"no replica can be started any more: {self._replicas[0].failure}")
                is_over = self._stop_at is not None and now >= self._stop_at
                nothing_waits = self._stop_at is not None and not (self._scheduler or self._retried)
                if (is_over or nothing_waits) and not self._in_flight():
                    return None
                may_run = not is_over and (not self._holding or self._stop_at is not None)
                if may_run and (picked := self._pick()) is not None:
                    return picked
                self._changed.wait(None if self._stop_at is None else max(0.1, self._stop_at - now))

    def _pick(self) -> tuple[Replica, Sequence[Request]] | None:
        """The next batch and its replica; None where nothing waits, or nobody has room. One that hangs has none."""
        takers = (replica for replica in self._replicas if replica.is_ready and not replica.is_stuck)
        ready = sorted(takers, key=lambda one: one.tokens)
        if self._retried and ready:  # each by itself: the replica with least to do gets nothing else before
            target = ready.pop(0)
            if not target.in_flight:
                return target, [self._retried.popleft()]
        free = [one for one in ready if one.tokens <= self._scheduler.max_tokens and not one.is_on_trial]
        if not free:
            return None
        # As if what waits were poured into vessels that stand as full as the replicas are.
        level = (self._scheduler.waiting_tokens + sum(one.tokens for one in free)) / len(free)
        batch = self._scheduler.next_batch(max(1, math.ceil(level - free[0].tokens)))
        return (free[0], batch) if batch else None

    def _hand_over(self, target: Replica, requests: Sequence[Request]) -> None:
        """Sends requests to a replica; those that nobody waits for any more are dropped."""
        now = time.monotonic()
        gone = [request for request in requests if request.is_gone(now)]
        self._drop(gone)
        due = [request for request in requests if request not in gone] if gone else requests
        with self._changed:
            if target.is_ready:
                target.send(due)
                return
            for request in due:  # it has died since
                if request.has_killed:
                    self._retried.append(request)
                else:
                    self._scheduler.put_back(request, 0)

    # What becomes of them, on the replicas' threads.

    def took(self, replica: Replica, report: Report, content: bytearray, requests: list[Request]) -> None:
        """Answers requests that have ended."""
        with self._changed:
            self.metrics.add_run_counts(report.counts)
            self._measure(report)
        results = unpack_results(report.ended, content)
        for ended, request in zip(report.ended, requests, strict=True):
            request.num_cached_tokens = ended.cached
            if ended.started:
                self.metrics.started([request], ended.started)
            if ended.results is not None:
                first, *others = next(results)
                self.metrics.ended(request, "ok")
                request.resolve(first, others)
            elif ended.error is not None:
                error = unpack_error(ended.error)
                self.metrics.ended(request, outcome_of(error))
                request.fail(error)
            else:
                self._drop([request])

    def _measure(self, report: Report) -> None:
        """Learns how fast the replicas are together, from passes that left others waiting."""
        counts = report.counts
        [tokens] = counts["computed_tokens"]
        *_, forward_s, _ = counts["forward_s"]
        *_, pool_s, _ = counts["pool_s"]
        if tokens and self._scheduler:
            speed = sum(one.is_ready for one in self._replicas) * tokens / max(forward_s + pool_s, 1e-6)
            known = self._admission.tokens_per_s
            self._admission.tokens_per_s = 0.9 * known + 0.1 * speed if known else speed

    def lost(self, replica: Replica, reason: str) -> None:
        """Runs once more what a replica had when it died, and fails what has had that already."""
        with self._changed:  # as a whole, so that what is lost is at every moment in flight or waiting
            requests = replica.take_back()
            again = [request for request in requests if not request.has_killed and self._takes_back]
            for request in again:
                request.has_killed = True
            self._retried += again
            self._changed.notify()
        for request in requests:
            if request in again:
                continue
            died = replica_error(request, replica.name, reason)
            self.metrics.ended(request, "error")
            request.fail(died if self._takes_back else EngineDeadError(self._end_message()))

    def close(self, *, drain_s: float = 0.0, timeout_s: float = 60.0) -> None:
        """As for any engine; then the replicas end."""
        super().close(drain_s=drain_s, timeout_s=timeout_s)
        self._kill()

    def _let_go(self) -> None:
        self._kill()

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _fail_waiting(self) -> None:
        super()._fail_waiting()
        error = EngineDeadError(self._end_message())
        with self._changed:
            self._takes_back = False
            waiting = [*self._retried, *(one for replica in self._replicas for one in replica.in_flight.values())]
            self._retried.clear()
        for request in waiting:
            request.fail(error)


class _Start:
    """Starts the replica of a place.

    Args:
        config: Of all of them.
        place: Where it runs.
    """

    def __init__(self, config: EngineConfig, place: Place) -> None:
        self._config, self._place = config, place

    def __call__(self, *, is_first: bool = False) -> ReplicaProcess:
        config, place = self._config, self._place
        setup = Setup(
            config=config.replace(
                data_parallel_size=1,
                lora_modules=None,  # the front names them
                use_tqdm_on_load=config.use_tqdm_on_load and is_first,
                kv_cache_memory_fraction=config.kv_cache_memory_fraction * place.memory_share,
            ),
            threads=place.threads,
            models=ModelRegistry.registered_paths(),
            heads=registered_heads(),
            is_first=is_first,
        )
        return ReplicaProcess(place.name, setup, cpus=place.cpus, environment=place.environment)
