"""Every accepted request gets its result or its error, whatever happens to the others and to the engine."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest
import torch

from anypool import LLM, EngineConfig
from anypool.engine.engine import Engine
from anypool.engine.request import Request
from anypool.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    InvalidPromptError,
    InvalidRequestError,
    NonFiniteResultError,
    OutOfMemoryError,
    OverloadedError,
)
from anypool.pooling.tasks import PoolingTask
from tests.helpers import assert_close, loaded, tiny_bert, vectors

MARKER = 77


class Gate:
    """Holds the device thread inside the model until it is opened."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._hook = model.register_forward_pre_hook(self._hold)

    def _hold(self, *_: Any) -> None:
        self.entered.set()
        assert self.opened.wait(30)

    def open(self) -> None:
        self.opened.set()


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(model=str(tiny_bert()), device="cpu", max_queued_tokens=10, use_tqdm_on_load=False)
    engine = Engine(config)
    yield engine
    engine.close()


@pytest.fixture
def gate(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine.loaded.model)
    yield gate
    gate.open()


def prepare(engine: Engine, *prompts: list[int]) -> list[Request]:
    return engine.prepare(prompts, PoolingTask.EMBED)


def ids(count: int = 3, token: int = 20) -> list[int]:
    return [2, *[token] * count, 3]


def raise_for_marker(model: torch.nn.Module, error: BaseException) -> None:
    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == MARKER).any():
            raise error

    model.register_forward_pre_hook(hook)


# One bad request


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("boom"), MemoryError("boom")], ids=repr)
def test_a_request_that_makes_the_model_raise_fails_alone(engine: Engine, error: Exception) -> None:
    lengths = [n % 9 + 1 for n in range(64)]
    clean = prepare(engine, *map(ids, lengths))
    engine.submit(clean)
    expected = [request.future.result(30) for request in clean]
    raise_for_marker(engine.loaded.model, error)
    requests = prepare(engine, *[ids(n, MARKER if i == 40 else 20) for i, n in enumerate(lengths)])
    engine.submit(requests)
    wait([request.future for request in requests], timeout=30)
    for i, (request, vector) in enumerate(zip(requests, expected, strict=True)):
        if i == 40:
            with pytest.raises(EngineError, match=f"request {request.request_id}: the model raised .*boom") as caught:
                request.future.result(30)
            assert caught.value.__cause__ is error
        else:
            assert_close(request.future.result(30), vector, atol=1e-6)
    assert engine.is_alive


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_fails_alone(engine: Engine, value: float) -> None:
    def hook(_: Any, args: tuple[torch.Tensor, ...], hidden_TD: torch.Tensor) -> torch.Tensor:
        return hidden_TD.masked_fill((args[0] == MARKER)[:, None], value)

    engine.loaded.model.register_forward_hook(hook)
    requests = prepare(engine, *[ids(i % 9 + 1, MARKER if i == 40 else 20) for i in range(64)])
    engine.submit(requests)
    for i, request in enumerate(requests):
        if i == 40:
            with pytest.raises(NonFiniteResultError, match=f"request {request.request_id}: the model gave NaN or inf"):
                request.future.result(30)
        else:
            assert request.future.result(30).isfinite().all()


def test_a_call_with_a_bad_prompt_raises_and_gives_up_the_others() -> None:
    with loaded(tiny_bert()) as llm:
        raise_for_marker(llm.engine.loaded.model, RuntimeError("boom"))
        with pytest.raises(EngineError, match="boom"):
            vectors(llm, [ids(), ids(token=MARKER), ids()])
        assert vectors(llm, [ids()]).isfinite().all()


def test_a_request_that_is_queued_twice_is_refused_and_hurts_nobody(engine: Engine, gate: Gate) -> None:
    first, second, third = prepare(engine, ids(), ids(4), ids(5))
    engine.submit([first])
    assert gate.entered.wait(30)
    for again in ([first], [second, second], [third, second, third]):
        with pytest.raises(InvalidRequestError, match="is queued twice: prepare one for each result"):
            engine.submit(again)
    engine.submit([second, third])
    gate.open()
    assert all(request.future.result(30).isfinite().all() for request in (first, second, third))


@pytest.mark.parametrize(
    "setting", [{"priority": float("nan")}, {"priority": "1"}, {"timeout_s": float("nan")}], ids=repr
)
def test_a_setting_that_cannot_be_ordered_is_refused(engine: Engine, setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(setting))):
        engine.submit(prepare(engine, ids()), **setting)


def test_any_integer_is_a_priority(engine: Engine, gate: Gate) -> None:
    first, last, urgent = prepare(engine, ids(), ids(), ids())
    engine.submit([first])
    assert gate.entered.wait(30)
    engine.submit([last], priority=10**400)
    engine.submit([urgent], priority=-(10**400))
    gate.open()
    assert all(request.future.result(30).isfinite().all() for request in (first, last, urgent))


def test_a_callback_that_raises_costs_nobody_an_answer(engine: Engine, gate: Gate) -> None:
    def leave(_: Any) -> None:
        raise SystemExit

    requests = prepare(engine, *map(ids, range(1, 9)))
    for request in requests:
        request.future.add_done_callback(leave)
    engine.submit(requests)
    gate.open()
    assert not wait([request.future for request in requests], timeout=30).not_done
    assert _run(engine, [ids()])[0].isfinite().all()


@pytest.mark.parametrize(
    "prompts", ["a text", {"prompt": "a text"}, None, iter([[2, 3]])], ids=["text", "dict", "None", "iterator"]
)
def test_what_is_not_a_list_of_prompts_is_refused(engine: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidPromptError, match="is not a list of prompts"):
        engine.prepare(prompts, PoolingTask.EMBED)


# Results


def test_a_result_that_is_kept_keeps_no_other(engine: Engine) -> None:
    for vector in _run(engine, [ids(n) for n in range(1, 30)]):
        assert vector.untyped_storage().nbytes() == vector.numel() * 4, "pickling it would write all of it"
    [rows], [vector] = _run(engine, [ids()], PoolingTask.TOKEN_EMBED), _run(engine, [ids()])
    assert rows.untyped_storage().nbytes() == rows.numel() * 4
    assert not vector.is_inference()
    assert not rows.is_inference()


def test_an_idle_engine_keeps_nothing_of_what_it_ran(engine: Engine) -> None:
    requests = prepare(engine, ids(), ids(4))
    engine.submit(requests)
    results = [request.future.result(30) for request in requests]
    kept = [weakref.ref(thing) for thing in (*requests, *results)]
    while engine.health().status != "alive":
        time.sleep(0.001)
    del requests, results
    gc.collect()
    assert all(thing() is None for thing in kept)


# Cancelling


def test_a_cancelled_request_is_not_run(engine: Engine, gate: Gate) -> None:
    ran: list[int] = []
    engine.loaded.model.register_forward_pre_hook(lambda _, args: ran.extend(args[0].tolist()))
    first, cancelled, last = prepare(engine, ids(), ids(token=MARKER), ids(token=30))
    engine.submit([first])
    assert gate.entered.wait(30)
    engine.submit([cancelled, last])
    assert cancelled.future.cancel()
    gate.open()
    assert last.future.result(30).shape == first.future.result(30).shape
    assert MARKER not in ran
    with pytest.raises(CancelledError):
        cancelled.future.result(30)


def test_a_request_that_is_running_may_be_cancelled(engine: Engine, gate: Gate) -> None:
    gone, stays = prepare(engine, ids(), ids(4))
    engine.submit([gone, stays])
    assert gate.entered.wait(30)
    assert gone.future.cancel()
    gate.open()
    assert stays.future.result(30).isfinite().all()
    assert wait([gone.future], timeout=30).done
    assert engine.is_alive


def test_an_engine_whose_requests_are_all_cancelled_goes_on(engine: Engine, gate: Gate) -> None:
    first, *rest = prepare(engine, *[ids()] * 5)
    engine.submit([first])
    assert gate.entered.wait(30)
    engine.submit(rest)
    assert all(request.future.cancel() for request in rest)
    gate.open()
    first.future.result(30)
    [after] = prepare(engine, ids())
    engine.submit([after])
    after.future.result(30)


# A full queue


def test_what_is_submitted_together_shares_a_batch(engine: Engine) -> None:
    requests = [prepare(engine, ids(3))[0] for _ in range(8)]
    with engine.together():
        for request in requests:
            engine.submit([request])
            time.sleep(0.005)
        assert not any(request.future.done() for request in requests)
    for request in requests:
        request.future.result(timeout=30)
    assert engine.metrics.batches == 1


def test_what_is_submitted_together_runs_when_the_next_is_refused(engine: Engine) -> None:
    [request] = prepare(engine, ids(3))
    with engine.together():
        engine.submit([request])
        with pytest.raises(InvalidRequestError):
            engine.submit([request])
    assert request.future.result(timeout=30).isfinite().all()


def test_what_is_held_together_is_drained_when_the_engine_closes(engine: Engine) -> None:
    requests = prepare(engine, ids(), ids())
    with engine.together():
        engine.submit(requests)
        engine.close(drain_s=20, timeout_s=5)
        assert all(request.future.done() for request in requests)
    assert all(request.future.result().isfinite().all() for request in requests)


def test_a_full_queue_refuses_only_bounded_requests(engine: Engine, gate: Gate) -> None:
    first, second, third, fourth = prepare(engine, ids(), ids(), ids(6), ids())
    engine.submit([first], bounded=True)
    assert gate.entered.wait(30)
    engine.submit([second], bounded=True)
    with pytest.raises(OverloadedError, match="5 tokens are waiting, and the queue takes 10") as caught:
        engine.submit([third], bounded=True)
    assert caught.value.retry_after_s > 0
    engine.submit([third, fourth])
    gate.open()
    for request in (first, second, third, fourth):
        request.future.result(30)


def test_a_request_whose_turn_would_come_too_late_is_refused(gate: Gate, engine: Engine) -> None:
    engine.config = engine.config.replace(max_queued_tokens=10**6, max_queue_s=2.0)
    engine._admission.tokens_per_s = 1000.0
    step = engine._scheduler.max_tokens
    running, *bulk = prepare(engine, ids(), *[ids(123)] * (2 * step // 125 + 1))
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit(bulk)
    small, large, urgent = prepare(engine, ids(), ids(123), ids(123))
    engine.submit([small], bounded=True)  # it passes the bulk
    several = [large, *prepare(engine, *[ids(123)] * (step // 125))]
    with pytest.raises(OverloadedError, match=r"the turn would come in \d\.\d s, and the limit is 2 s") as caught:
        engine.submit(several, bounded=True)
    assert caught.value.retry_after_s >= 1
    engine.submit([urgent], bounded=True, priority=-1)
    gate.open()
    for request in (running, small, urgent, *bulk):
        request.future.result(30)


def test_speed_is_that_of_batches_that_left_others_waiting(engine: Engine) -> None:
    engine.submit(prepare(engine, ids())[:1])
    [lone] = prepare(engine, ids())
    engine.submit([lone])
    lone.future.result(30)
    assert engine._admission.tokens_per_s == 0
    engine._scheduler.max_seqs = 1
    many = prepare(engine, *[ids()] * 3)
    engine.submit(many)
    for request in many:
        request.future.result(30)
    assert engine._admission.tokens_per_s > 0


def test_cancelled_requests_take_no_room_in_the_queue(engine: Engine, gate: Gate) -> None:
    running, gone, new = prepare(engine, ids(5), ids(8), ids(8))
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([gone], bounded=True)
    assert gone.future.cancel()
    engine.submit([new], bounded=True)
    gate.open()
    new.future.result(30)


def test_refusing_many_does_not_go_through_the_queue_for_each(engine: Engine, gate: Gate) -> None:
    running, waiting, *refused = prepare(engine, *[ids(5)] * 22)
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([waiting])
    take_gone, calls = engine._scheduler.take_gone, []

    def slowly() -> list[Request]:
        calls.append(None)
        time.sleep(0.1)
        return take_gone()

    engine._scheduler.take_gone = slowly  # type: ignore[method-assign]
    for request in refused:
        with pytest.raises(OverloadedError):
            engine.submit([request], bounded=True)
    assert len(calls) <= 2
    gate.open()
    waiting.future.result(30)


def test_a_request_larger_than_the_queue_is_taken_when_the_queue_is_empty(engine: Engine) -> None:
    [long] = prepare(engine, ids(30))
    engine.submit([long], bounded=True)
    long.future.result(30)


def test_callbacks_of_what_a_full_queue_drops_run_without_its_lock(engine: Engine, gate: Gate) -> None:
    running, expired, new = prepare(engine, ids(5), ids(8), ids(8))
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([expired], timeout_s=0)
    waited = []

    def ask_from_another_thread(_: Any) -> None:
        asking = threading.Thread(target=engine.submit, args=([],), daemon=True)
        asking.start()
        asking.join(10)
        waited.append(asking.is_alive())

    expired.future.add_done_callback(ask_from_another_thread)
    engine.submit([new], bounded=True)
    assert waited == [False]
    gate.open()
    new.future.result(30)


# Memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("boom"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_running_out_of_memory_once_is_survived_and_remembered(engine: Engine, error: Exception) -> None:
    prompts = [ids(n + 60) for n in range(20)]
    expected = _run(engine, prompts)
    failures = iter([error])

    def fail_once(*_: Any) -> None:
        if failure := next(failures, None):
            raise failure

    engine.loaded.model.register_forward_pre_hook(fail_once)
    for vector, before in zip(_run(engine, prompts), expected, strict=True):
        assert_close(vector, before, atol=1e-6)
    assert engine.metrics.out_of_memory == 1
    assert engine._scheduler.max_tokens < sum(map(len, prompts)), "the budget is smaller now"
    batches = engine.metrics.batches
    _run(engine, prompts)
    assert engine.metrics.batches - batches >= 2
    assert engine.metrics.out_of_memory == 1


def test_a_lone_request_gets_one_more_try_when_memory_is_short(engine: Engine) -> None:
    [expected] = _run(engine, [ids()])
    failures = iter([MemoryError("boom")])

    def fail_once(*_: Any) -> None:
        if failure := next(failures, None):
            raise failure

    engine.loaded.model.register_forward_pre_hook(fail_once)
    [vector] = _run(engine, [ids()])
    assert_close(vector, expected, atol=1e-6)


def test_what_a_failed_pass_computed_is_freed_before_it_is_run_again(engine: Engine) -> None:
    computed: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        alive.append(sum(tensor() is not None for tensor in computed))
        large = torch.ones(8)
        computed.append(weakref.ref(large))
        if len(args[0]) > 16:
            try:
                raise ValueError("the cause")
            except ValueError:
                raise MemoryError("boom") from None

    engine.loaded.model.register_forward_pre_hook(hook)
    _run(engine, [ids(n) for n in range(1, 9)])
    assert len(alive) > 4
    assert not any(alive)


def test_a_prompt_that_is_longer_than_a_batch_and_does_not_fit_leaves_batches_as_large_as_they_were(
    engine: Engine,
) -> None:
    engine._scheduler.max_tokens = 100

    def too_large(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if len(args[0]) > 100:
            raise MemoryError("boom")

    engine.loaded.model.register_forward_pre_hook(too_large)
    for request in (requests := prepare(engine, ids(110), ids(120))):
        engine.submit([request])
    for request in requests:
        with pytest.raises(OutOfMemoryError):
            request.future.result(30)
    assert engine._scheduler.max_tokens == 100


# Deadlines


def test_a_request_whose_time_is_up_is_dropped_with_an_error(engine: Engine, gate: Gate) -> None:
    ran: list[int] = []
    engine.loaded.model.register_forward_pre_hook(lambda _, args: ran.extend(args[0].tolist()))
    first, late, last = prepare(engine, ids(), ids(token=MARKER), ids(token=30))
    engine.submit([first])
    assert gate.entered.wait(30)
    engine.submit([late], timeout_s=0.01)
    engine.submit([last], timeout_s=60)
    time.sleep(0.05)
    gate.open()
    assert last.future.result(30).isfinite().all()
    with pytest.raises(DeadlineExceededError, match=f"request {late.request_id}: its time was up"):
        late.future.result(30)
    assert MARKER not in ran
    assert engine.metrics.requests == {"ok": 2, "expired": 1}


# Health


def test_health_is_alive_then_busy_then_stuck_then_dead(engine: Engine, gate: Gate) -> None:
    assert engine.health().status == "alive"
    running, waiting = prepare(engine, ids(), ids(4))
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([waiting])
    health = engine.health()
    assert (health.status, health.waiting_requests, health.waiting_tokens) == ("busy", 1, 6)
    engine.config = engine.config.replace(stuck_after_s=0.01)
    time.sleep(0.05)
    health = engine.health()
    assert health.status == "stuck"
    assert "a batch of 1 has been running for" in health.message
    gate.open()
    waiting.future.result(30)
    engine.close()
    assert engine.health().status == "dead"
    assert engine.health().message == "the engine is shut down"


def test_a_batch_that_begins_while_health_looks_is_not_called_stuck(engine: Engine) -> None:
    class Begins(list[Request]):
        def __len__(self) -> int:
            engine._beat = time.monotonic()
            return 1

    engine._beat = time.monotonic() - 1000
    engine._running = Begins()
    assert engine.health().status == "busy"


def test_a_batch_that_begins_while_health_looks_at_the_clock_has_no_negative_age(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic

    def begins() -> float:
        now = clock()
        engine._beat = now + 1
        return now

    engine._beat = clock()
    monkeypatch.setattr(time, "monotonic", begins)
    assert engine.health().age_s >= 0


def test_halves_of_a_failed_batch_are_not_stuck(engine: Engine) -> None:
    ages: list[float] = []

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        ages.append(engine.health().age_s)
        engine._beat -= 1000
        if len(args[0]) > 8:
            raise RuntimeError("boom")

    engine.loaded.model.register_forward_pre_hook(hook)
    requests = prepare(engine, *[ids()] * 4)
    engine.submit(requests)
    assert all(request.future.result(30).isfinite().all() for request in requests)
    assert len(ages) == 7
    assert max(ages) < 1000


# The end


def test_close_may_wait_for_ever(engine: Engine) -> None:
    engine.close(drain_s=float("inf"))
    assert engine.health().status == "dead"


def test_close_lets_the_queue_drain_within_its_time(engine: Engine, gate: Gate) -> None:
    requests = prepare(engine, *[ids(n + 1) for n in range(8)])
    engine.submit(requests)
    assert gate.entered.wait(30)
    closing = threading.Thread(target=engine.close, kwargs={"drain_s": 30})
    closing.start()
    while engine.is_alive:
        time.sleep(0.001)
    with pytest.raises(EngineDeadError):
        engine.submit(prepare(engine, ids()))
    gate.open()
    closing.join(30)
    assert all(request.future.result(0).isfinite().all() for request in requests)


def test_close_gives_up_a_stuck_thread_and_answers_everyone(engine: Engine, gate: Gate) -> None:
    running, waiting = prepare(engine, ids(), ids(4))
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([waiting])
    engine.close(timeout_s=0.05)
    for request in (running, waiting):
        with pytest.raises(EngineDeadError, match="shut down"):
            request.future.result(0)
    gate.open()
    engine._thread.join(30)
    assert not engine._thread.is_alive()


def test_close_finishes_what_runs_and_fails_what_waits(engine: Engine, gate: Gate) -> None:
    running, waiting, cancelled = prepare(engine, ids(), ids(), ids())
    engine.submit([running])
    assert gate.entered.wait(30)
    engine.submit([waiting, cancelled])
    cancelled.future.cancel()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(30)
    assert not closing.is_alive()
    assert running.future.result(30).isfinite().all()
    with pytest.raises(EngineDeadError, match="shut down"):
        waiting.future.result(30)
    assert cancelled.future.cancelled()
    assert not engine.is_alive


def test_a_closed_engine_takes_no_requests(engine: Engine) -> None:
    requests = prepare(engine, ids())
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="the engine is shut down"):
        engine.submit(requests)


def test_a_closed_llm_says_so() -> None:
    with loaded(tiny_bert()) as llm:
        pass
    with pytest.raises(EngineDeadError, match="the engine is shut down"):
        llm.embed("cat", use_tqdm=False)


@pytest.mark.parametrize(
    "error", [SystemExit("killed"), RuntimeError("CUDA error: an illegal memory access was encountered")], ids=repr
)
def test_a_dead_device_thread_fails_what_runs_what_waits_and_what_comes(
    error: BaseException, engine: Engine, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """After some errors of a GPU every call fails: nothing is run again, in halves or otherwise."""
    running, neighbour, waiting, late = prepare(engine, ids(token=MARKER), ids(), ids(), ids())
    raise_for_marker(engine.loaded.model, error)
    message = f"the device thread died: {error!r}"
    engine.submit([running, neighbour])
    assert gate.entered.wait(30)
    engine.submit([waiting])
    with caplog.at_level(logging.ERROR):
        gate.open()
        for request in (running, neighbour, waiting):
            with pytest.raises(EngineDeadError, match=re.escape(message)):
                request.future.result(30)
    assert "the device thread died" in caplog.text
    engine._thread.join(2)
    health = engine.health()
    assert health.status == "dead"
    assert health.message == message
    with pytest.raises(EngineDeadError, match="the device thread died"):
        engine.submit([late])


def test_the_engine_survives_many_threads_that_submit_and_cancel(engine: Engine) -> None:
    prompts = [ids(n % 9 + 1) for n in range(40)]
    expected = {len(p): r for p, r in zip(prompts, _run(engine, prompts), strict=True)}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            requests = prepare(engine, *prompts)
            engine.submit(requests)
            for index, request in enumerate(requests):
                if (index + seed) % 5 == 0 and request.future.cancel():
                    continue
                assert_close(request.future.result(30), expected[len(request)], atol=1e-6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert len(engine._scheduler) == 0


def _run(engine: Engine, prompts: list[list[int]], task: PoolingTask = PoolingTask.EMBED) -> list[torch.Tensor]:
    requests = engine.prepare(prompts, task)
    engine.submit(requests)
    return [request.future.result(30) for request in requests]


def test_results_come_in_the_order_of_the_prompts_across_batches() -> None:
    prompts = [ids(n % 13 + 1, 20 + n % 7) for n in range(60)]
    with loaded(tiny_bert(), max_num_batched_tokens=16, max_num_seqs=3) as small, loaded(tiny_bert()) as large:
        assert_close(vectors(small, prompts), vectors(large, prompts), atol=1e-6)
        [output] = small.embed([ids(50)], use_tqdm=False)  # more tokens than a batch may have
        assert len(output.prompt_token_ids) == 52


def test_an_llm_that_is_dropped_stops_its_thread() -> None:
    llm = LLM(tiny_bert(), device="cpu", use_tqdm_on_load=False)
    thread = llm.engine._thread
    del llm
    thread.join(30)
    assert not thread.is_alive()
