"""Callers of one event loop get their own answers, and a caller that fails, waits too long or leaves hurts no other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from anypool import LLM, AsyncEngine, EngineConfig, PoolingParams, PoolingTask, ServingOptions
from anypool.engine.engine import Engine
from anypool.engine.request import Request
from anypool.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    OverloadedError,
)
from tests.engine.test_engine import MARKER, Gate, ids, raise_for_marker
from tests.helpers import assert_close, loaded, tiny_bert, tiny_llama, vectors


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(model=str(tiny_bert()), device="cpu", max_queued_tokens=100, use_tqdm_on_load=False)
    engine = Engine(config)
    yield engine
    engine.close()


@pytest.fixture
def gate(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine.loaded.model)
    yield gate
    gate.open()


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 60))


async def embed(engine: AsyncEngine, *prompts: Any, **options: Any) -> list[torch.Tensor]:
    _, results = await engine.run(prompts, PoolingTask.EMBED, options=ServingOptions(**options))
    return results


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_each_of_many_callers_gets_the_numbers_of_the_synchronous_face() -> None:
    prompts = [ids(n % 40 + 1, 20 + n % 5) for n in range(64)]
    with loaded(tiny_bert()) as llm:
        expected = vectors(llm, prompts)
        serving = AsyncEngine(llm.engine)

        async def main() -> list[list[torch.Tensor]]:
            return await asyncio.gather(*(embed(serving, prompt) for prompt in prompts))

        for _ in range(2):  # a second loop may follow the first
            answers = run(main)
            assert_close(torch.stack([answer for [answer] in answers]), expected, atol=1e-6)


def test_callers_that_arrive_together_share_a_batch(engine: Engine) -> None:
    serving = AsyncEngine(engine)

    async def main() -> None:
        await asyncio.gather(*(embed(serving, ids(3)) for _ in range(16)))

    run(main)
    assert engine.metrics.batches == 1
    assert engine.metrics.batch_sequences.sum == 16
    assert engine.metrics.computed_tokens == 16 * 5
    assert engine.metrics.queue_s.count == 16
    assert 0 <= engine.metrics.padding_tokens <= 16


def test_a_call_has_requests_and_results_in_the_order_of_its_prompts(engine: Engine) -> None:
    serving = AsyncEngine(engine)

    async def main() -> tuple[list[Request], list[torch.Tensor]]:
        params = [PoolingParams(dimensions=n) for n in (4, 8, 16)]
        return await serving.run([ids(9), ids(1), ids(5)], "embed", params)

    requests, results = run(main)
    assert [len(request) for request in requests] == [11, 3, 7]
    assert [len(result) for result in results] == [4, 8, 16]


def test_a_call_without_prompts_is_answered(engine: Engine) -> None:
    assert run(lambda: embed(AsyncEngine(engine))) == []


def test_an_error_of_one_caller_is_not_that_of_its_neighbours(engine: Engine) -> None:
    raise_for_marker(engine.loaded.model, RuntimeError("boom"))
    serving = AsyncEngine(engine)

    async def main() -> list[Any]:
        calls = (
            embed(serving, ids()),
            embed(serving, []),
            embed(serving, ids(4), ids(token=MARKER)),
            serving.run([ids()], "no task"),
            embed(serving, ids(5)),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    good, empty, marked, unknown, other = run(main)
    assert good[0].isfinite().all()
    assert other[0].isfinite().all()
    assert isinstance(empty, InvalidPromptError)
    assert isinstance(marked, EngineError)
    assert isinstance(unknown, InvalidRequestError)


@pytest.mark.parametrize(
    "error", [StopIteration(), StopAsyncIteration(), SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_preparing_may_raise_anything_and_other_callers_go_on(engine: Engine, error: BaseException) -> None:
    serving = AsyncEngine(engine)

    def prepare() -> list[Request]:
        raise error

    async def main() -> None:
        with pytest.raises(EngineError, match=f"preparing the prompts raised {type(error).__name__}"):
            await serving.serve(prepare)
        await embed(serving, ids())

    run(main)


def test_a_call_is_answered_when_somebody_else_cancels_one_of_its_requests(engine: Engine, gate: Gate) -> None:
    serving = AsyncEngine(engine)
    requests = engine.prepare([ids(), ids(4)], PoolingTask.EMBED)

    async def main() -> None:
        call = asyncio.ensure_future(serving.serve(lambda: requests))
        await until(gate.entered.is_set)
        requests[1].future.cancel()
        gate.open()
        with pytest.raises(CancelledError, match="a request was cancelled"):
            await call

    run(main)


def test_a_time_that_no_clock_reaches_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s=nan is not a number of seconds"):
        ServingOptions(timeout_s=float("nan"))


def test_large_calls_that_wait_to_be_prepared_are_bounded(engine: Engine) -> None:
    serving = AsyncEngine(engine, threads=2)
    go_on = threading.Event()
    options = ServingOptions(bounded=False)

    def slowly() -> list[Request]:
        assert go_on.wait(30)
        return engine.prepare([ids()], PoolingTask.EMBED)

    async def main() -> None:
        running = asyncio.ensure_future(serving.serve(slowly, size=10**6))
        await until(lambda: serving._idle_threads == 1)
        waiting = asyncio.ensure_future(serving.serve(slowly, size=10**6))
        await asyncio.sleep(0)
        for size in (10**5, 10**6):
            with pytest.raises(OverloadedError, match="1,000,000 characters wait to be prepared, of at most 400"):
                await serving.serve(slowly, size=size)
        unbounded = asyncio.ensure_future(serving.serve(slowly, options, size=10**5))
        await embed(serving, ids())  # small ones are prepared beside it
        go_on.set()
        await asyncio.gather(running, waiting, unbounded)
        await serving.serve(slowly, size=10**6)

    run(main)
    assert engine.metrics.rejected == 2


def test_a_call_whose_time_is_up_fails_at_once_and_is_not_run(engine: Engine, gate: Gate) -> None:
    ran: list[int] = []
    engine.loaded.model.register_forward_pre_hook(lambda _, args: ran.extend(args[0].tolist()))
    serving = AsyncEngine(engine)

    async def main() -> None:
        first = asyncio.ensure_future(embed(serving, ids()))
        await until(gate.entered.is_set)
        start = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"no result within 0\.05 s"):
            await embed(serving, ids(token=MARKER), timeout_s=0.05)
        assert time.monotonic() - start < 10, "the device is busy, and the caller does not wait for it"
        gate.open()
        await first
        await embed(serving, ids(4))

    run(main)
    assert MARKER not in ran


def test_a_caller_that_leaves_while_its_call_is_prepared_or_queued_leaves_nothing_behind(
    engine: Engine, gate: Gate
) -> None:
    ran: list[int] = []
    engine.loaded.model.register_forward_pre_hook(lambda _, args: ran.extend(args[0].tolist()))
    serving = AsyncEngine(engine)
    preparing, go_on = threading.Event(), threading.Event()

    def slowly() -> list[Request]:
        preparing.set()
        assert go_on.wait(30)
        return engine.prepare([ids(token=MARKER)], PoolingTask.EMBED)

    async def main() -> None:
        first = asyncio.ensure_future(embed(serving, ids()))
        await until(gate.entered.is_set)
        queued = asyncio.ensure_future(embed(serving, ids(token=MARKER)))
        await until(lambda: engine.health().waiting_requests == 1)
        prepared = asyncio.ensure_future(serving.serve(slowly))
        await until(preparing.is_set)
        for call in (queued, prepared):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        go_on.set()
        gate.open()
        await first
        await embed(serving, ids(4))

    run(main)
    assert MARKER not in ran


@pytest.mark.parametrize(("sizes", "here"), [((10,), True), ((10, 10), False), ((5000,), False), ((0,), False)])
def test_only_a_tiny_call_that_comes_alone_is_prepared_on_the_loop(
    engine: Engine, sizes: tuple[int, ...], here: bool
) -> None:
    serving = AsyncEngine(engine)
    threads: list[int] = []

    def prepare() -> list[Request]:
        threads.append(threading.get_ident())
        return engine.prepare([ids(3)], PoolingTask.EMBED)

    async def main() -> None:
        answers = await asyncio.gather(*(serving.serve(prepare, size=size) for size in sizes))
        assert all(len(results) == 1 for _, results in answers)

    run(main)
    assert [thread == threading.get_ident() for thread in threads] == [here] * len(sizes)


def test_times_of_a_request_are_noted(engine: Engine) -> None:
    [request] = engine.prepare([ids(3)], PoolingTask.EMBED)
    engine.submit([request])
    request.future.result(10)
    assert 0 < request.submitted <= request.started <= request.finished


def test_a_slow_call_holds_up_no_small_one(engine: Engine) -> None:
    serving = AsyncEngine(engine, threads=2)
    go_on = threading.Event()

    def slowly() -> list[Request]:
        assert go_on.wait(30)
        return engine.prepare([ids()], PoolingTask.EMBED)

    async def main() -> None:
        options = ServingOptions(bounded=False)
        slow = [asyncio.ensure_future(serving.serve(slowly, options, size=10**6)) for _ in range(5)]
        await asyncio.sleep(0.01)
        await embed(serving, ids(4))
        assert not any(call.done() for call in slow)
        go_on.set()
        await asyncio.gather(*slow)

    run(main)


def test_overload_is_refused_at_once_and_leaves_the_engine_as_it_was(engine: Engine, gate: Gate) -> None:
    """Twenty times what the queue takes: the rest is refused promptly, and what was taken is answered."""
    serving = AsyncEngine(engine)
    prompts = [ids(3 + n % 5) for n in range(300)]
    assert sum(map(len, prompts)) > 20 * 100

    async def main() -> tuple[list[Any], float]:
        first = asyncio.ensure_future(embed(serving, ids()))
        await until(gate.entered.is_set)
        start = time.monotonic()
        calls = [asyncio.ensure_future(embed(serving, prompt)) for prompt in prompts]
        await until(lambda: sum(call.done() for call in calls) >= len(calls) - 100 // 5)
        refused_s = time.monotonic() - start
        gate.open()
        await first
        return await asyncio.gather(*calls, return_exceptions=True), refused_s

    answers, refused_s = run(main)
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert all(answer.retry_after_s >= 1 for answer in refused)
    assert refused_s < 10, "nobody waited for the device to hear it"
    served = [answer for answer in answers if not isinstance(answer, Exception)]
    assert len(served) + len(refused) == len(prompts)
    assert 10 <= len(served) <= 20
    assert engine.metrics.rejected == len(refused)
    assert engine.health().waiting_tokens == 0
    again = run(lambda: embed(serving, ids()))
    assert again[0].isfinite().all()


def test_a_closed_engine_answers_everyone(engine: Engine, gate: Gate) -> None:
    serving = AsyncEngine(engine)

    async def main() -> list[Any]:
        calls = [asyncio.ensure_future(embed(serving, ids()))]
        await until(gate.entered.is_set)
        calls.append(asyncio.ensure_future(embed(serving, ids(4))))
        await until(lambda: engine.health().waiting_requests == 1)
        closing = asyncio.ensure_future(serving.close())
        await until(lambda: not engine.is_alive)
        gate.open()
        await closing
        calls.append(asyncio.ensure_future(embed(serving, ids(5))))
        return await asyncio.gather(*calls, return_exceptions=True)

    running, waiting, late = run(main)
    assert running[0].isfinite().all()
    assert isinstance(waiting, EngineDeadError)
    assert isinstance(late, EngineDeadError)


def test_a_device_thread_that_dies_answers_every_caller(engine: Engine, gate: Gate) -> None:
    raise_for_marker(engine.loaded.model, SystemExit("killed"))
    serving = AsyncEngine(engine)

    async def main() -> list[Any]:
        calls = [asyncio.ensure_future(embed(serving, ids(token=MARKER)))]
        await until(gate.entered.is_set)
        calls += [asyncio.ensure_future(embed(serving, ids(n))) for n in range(1, 9)]
        await until(lambda: engine.health().waiting_requests == 8)
        gate.open()
        start = time.monotonic()
        await until(lambda: engine.health().status == "dead")
        assert time.monotonic() - start < 2
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(answer) for answer in run(main)] == [EngineDeadError] * 9


def test_priorities_and_salts_reach_the_engine() -> None:
    with LLM(tiny_llama(), device="cpu", enable_prefix_caching=True, use_tqdm_on_load=False) as llm:
        serving = AsyncEngine(llm.engine)
        prompt = list(range(20, 60))

        async def main() -> list[tuple[int, int]]:
            found = []
            for salt in ("a", "b", "a"):
                options = ServingOptions(priority=-3, cache_salt=salt)
                [request], _ = await serving.run([prompt], "embed", options=options)
                found.append((request.priority, request.num_cached_tokens))
            return found

        assert run(main) == [(-3, 0), (-3, 0), (-3, 32)]
