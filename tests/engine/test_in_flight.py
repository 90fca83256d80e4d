"""With several batches in flight every request still gets its own numbers, or its own error."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anypool import LLM
from anypool.engine.executor import LocalExecutor
from anypool.errors import EngineDeadError, EngineError, OutOfMemoryError
from anypool.model_executor.faults import PeerFailedError
from anypool.model_executor.pooling_model_runner import PoolingModelRunner, RunnerOutput
from anypool.model_executor.rank import Work
from anypool.pooling.tasks import PoolingTask
from tests.engine.test_chunks_and_prefixes import BLOCK, IN_PARTS, random_prompts
from tests.helpers import assert_close, loaded, tiny_llama, vectors

BAD, NO_MEMORY, LOST = 113, 114, 115


class Answer:
    """What a device would still be at: computed when it is asked for, like everything before it."""

    def __init__(self, executor: LateExecutor, work: Work) -> None:
        self._executor, self._work = executor, work
        self.is_done = False
        self._outcome: RunnerOutput | Exception | None = None

    def compute(self) -> None:
        ids = self._work.batch.input_ids_T.tolist()
        try:
            self._executor.check(ids)
            launched = LocalExecutor.launch(self._executor, self._work)
            self._outcome = launched.result()
        except Exception as error:
            self._outcome = error
        self.is_done = True

    def result(self) -> RunnerOutput:
        while not self.is_done:
            self._executor.waiting.popleft().compute()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class LateExecutor(LocalExecutor):
    """A device whose errors come with the results, as those of a GPU do, and of ranks."""

    def __init__(self, runner: PoolingModelRunner, depth: int) -> None:
        super().__init__(runner)
        self.depth = depth
        self.waiting: deque[Answer] = deque()
        self.most = 0
        self.may_lose = 1

    def launch(self, work: Work) -> Any:
        answer = Answer(self, work)
        self.waiting.append(answer)
        self.most = max(self.most, len(self.waiting))
        return answer

    def check(self, ids: list[int]) -> None:
        if BAD in ids:
            raise ValueError("boom")
        if NO_MEMORY in ids and len(ids) > 8:
            raise MemoryError("boom")
        if LOST in ids and self.may_lose:
            self.may_lose -= 1
            raise PeerFailedError("another batch failed")


@pytest.fixture(params=[2, 4])
def late(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LateExecutor]]:
    small = {"kv_cache_memory_fraction": 1e-9}  # room for one prompt of any length
    with loaded(tiny_llama(), enable_prefix_caching=True, max_num_seqs=3, **IN_PARTS, **small) as llm:
        executor = LateExecutor(llm.engine._executor.runner, request.param)  # type: ignore[attr-defined]
        llm.engine._executor = executor
        yield llm, executor
        cache = llm.engine._cache
        assert cache is not None
        assert not llm.engine._flights
        assert cache.pool.num_free == cache.pool.num_blocks


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[list[list[int]]], torch.Tensor]]:
    with loaded(tiny_llama(), enable_chunked_prefill=False) as llm:
        yield lambda prompts: vectors(llm, prompts)


def run(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor | Exception]:
    requests = llm.engine.prepare(prompts, PoolingTask.EMBED)
    with llm.engine.together():
        llm.engine.submit(requests)
    return [request.future.exception(60) or request.future.result() for request in requests]  # type: ignore[misc]


def test_prompts_whole_in_chunks_and_over_prefixes(late: Any, alone: Any) -> None:
    llm, executor = late
    shared, *tails = random_prompts(1, [20, 1, 5, 60, 2, 30, 9, 100, 16, 3])
    prompts = [*tails, *([*shared, *tail] for tail in tails)]
    for _ in range(2):
        for row, expected in zip(run(llm, prompts), alone(prompts), strict=True):
            assert_close(row, expected)
    assert executor.most == executor.depth
    assert llm.engine.metrics.cached_tokens > 0


def test_chunks_of_one_prompt_are_in_flight_together(late: Any, alone: Any) -> None:
    llm, executor = late
    [prompt] = random_prompts(2, [100])
    [row] = run(llm, [prompt])
    assert_close(row, alone([prompt])[0])
    assert executor.most == executor.depth


@pytest.mark.parametrize("places", [[3], [3, 20], [40], [70], [98]], ids=str)
def test_a_long_prompt_whose_chunk_fails_fails_alone(late: Any, alone: Any, places: list[int]) -> None:
    llm, _ = late
    good, bad, other = random_prompts(3, [100, 99, 40])
    for place in places:
        bad[place] = BAD
    first, failure, second = run(llm, [good, bad, other])
    assert isinstance(failure, EngineError)
    assert "boom" in str(failure)
    assert llm.engine.metrics.requests == {"ok": 2, "error": 1}, "one answer each"
    assert_close(torch.stack([first, second]), alone([good, other]))  # type: ignore[list-item]


def test_a_bad_request_among_batches_in_flight_fails_alone(late: Any, alone: Any) -> None:
    llm, _ = late
    prompts = random_prompts(4, [3, 4, 5, 3, 4, 5, 3, 4, 5, 6])
    expected = alone(prompts)
    prompts[4] = [BAD, *prompts[4][1:]]
    for index, row in enumerate(run(llm, prompts)):
        if index == 4:
            assert isinstance(row, EngineError)
        else:
            assert_close(row, expected[index])  # type: ignore[arg-type]


def test_memory_that_is_short_is_remembered_and_costs_nobody_an_answer(late: Any, alone: Any) -> None:
    llm, _ = late
    prompts = random_prompts(5, [4, 5, 4, 12])
    prompts[1][0] = NO_MEMORY
    *rows, lone = run(llm, [*prompts, [NO_MEMORY, *[20] * 11]])
    assert isinstance(lone, OutOfMemoryError)
    for row, expected in zip(rows, alone(prompts), strict=True):
        assert_close(row, expected)


@pytest.mark.parametrize("length", [5, 70])
def test_what_was_lost_with_another_batch_runs_again(late: Any, alone: Any, length: int) -> None:
    llm, executor = late
    executor.may_lose = 3
    prompts = random_prompts(6, [length, 4, 30])
    prompts[0][-1] = LOST
    for row, expected in zip(run(llm, prompts), alone(prompts), strict=True):
        assert_close(row, expected)
    assert llm.engine.metrics.failed_batches == 0
    assert executor.may_lose == 0


def test_what_is_cancelled_in_flight_costs_nobody_an_answer(late: Any, alone: Any) -> None:
    llm, _ = late
    gone, stays = random_prompts(7, [100, 50])
    requests = llm.engine.prepare([gone, stays], PoolingTask.EMBED)
    with llm.engine.together():
        llm.engine.submit(requests)
        requests[0].future.cancel()
    assert_close(requests[1].future.result(60), alone([stays])[0])


def test_closing_gives_what_is_in_flight_and_fails_what_waits() -> None:
    with loaded(tiny_llama(), max_num_seqs=1, block_size=BLOCK) as llm:
        executor = LateExecutor(llm.engine._executor.runner, 3)  # type: ignore[attr-defined]
        llm.engine._executor = executor
        entered, opened = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            entered.set()
            assert opened.wait(30)

        llm.engine.loaded.model.register_forward_pre_hook(hold)
        requests = llm.engine.prepare(random_prompts(8, [4] * 6), PoolingTask.EMBED)
        llm.engine.submit(requests)
        assert entered.wait(30)
        closing = threading.Thread(target=llm.engine.close)
        closing.start()
        while llm.engine.is_alive:
            time.sleep(0.001)
        opened.set()
        closing.join(30)
        outcomes = [request.future.exception(0) for request in requests]
        assert outcomes[:3] == [None] * 3, "they were launched before"
        assert all(isinstance(error, EngineDeadError) for error in outcomes[3:])
