"""An engine of several processes answers like one of a single process, and none of them outlives it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anypool import LLM, PoolingParams
from anypool.engine import processes as processes_module
from anypool.engine.patience import LOOK_S, AwakeClock
from anypool.engine.ranks import RanksExecutor
from anypool.engine.request import Request
from anypool.errors import ConfigError, EngineDeadError, EngineError, WeightsError
from anypool.model_executor.registry import ModelRegistry
from anypool.pooling.tasks import PoolingTask
from tests.adapters.test_heads import COMMON, GQA, save_head
from tests.distributed.faulty import BAD, NO_MEMORY, PASSES, SLOW, STUCK, FaultyForCausalLM
from tests.helpers import assert_close, copy_of, loaded, new_folder, tiny_llama
from tests.models.parity import random_ids

TASKS: list[tuple[str, dict[str, Any]]] = [
    ("embed", {}),
    ("embed", {"dimensions": 8}),
    ("token_embed", {}),
    ("classify", {}),
    ("token_classify", {}),
    ("reward", {}),
]
IN_PARTS = {"max_num_batched_tokens": 16, "block_size": 4, "enable_prefix_caching": True}
WHOLE = {"enable_chunked_prefill": False, "enable_prefix_caching": False}


@cache
def decoder() -> Path:
    folder = new_folder("ranks-decoder")
    save_head("Llama", GQA, "SequenceClassification", folder)
    return folder


@cache
def encoder() -> Path:
    folder = new_folder("ranks-encoder")
    save_head("Bert", COMMON, "SequenceClassification", folder)
    return folder


@contextmanager
def ranks(folder: Path, tp: int, pp: int, **engine: Any) -> Iterator[LLM]:
    """An engine of several processes, which are gone afterwards."""
    with loaded(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, **engine) as llm:
        pids = pids_of(llm)
        assert len(pids) == tp * pp - 1
        yield llm
    assert not any(map(is_running, pids))


def pids_of(llm: LLM) -> list[int]:
    executor: Any = llm.engine._executor
    return [process.pid for process in executor._processes._processes.values()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a process was left behind"
        time.sleep(0.05)


def submit(
    llm: LLM, prompts: list[list[int]], task: str = "embed", fields: dict[str, Any] | None = None
) -> list[Request]:
    requests = llm.engine.prepare(prompts, PoolingTask(task), PoolingParams(**(fields or {})))
    llm.engine.submit(requests)
    return requests


def answers(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The rows of every task, all of them queued at once."""
    requests = [submit(llm, prompts, task, fields) for task, fields in TASKS]
    return [request.future.result(60) for request in itertools.chain(*requests)]


@cache
def expected(folder: Path) -> list[torch.Tensor]:
    with loaded(folder) as llm:
        return answers(llm, random_ids(110))


@pytest.mark.parametrize(
    ("make", "tp", "pp"),
    [(encoder, 2, 1), (encoder, 1, 2), (encoder, 2, 2), (decoder, 2, 1), (decoder, 1, 2)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_whole_prompts_of_ranks_equal_one_process(make: Callable[[], Path], tp: int, pp: int) -> None:
    rows, settings = expected(make()), WHOLE if make is decoder else {}
    with ranks(make(), tp, pp, max_num_seqs=2, **settings) as llm:
        for found, row in zip(answers(llm, random_ids(110)), rows, strict=True):
            assert_close(found, row)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_decoder_of_ranks_equals_one_process_in_chunks_and_over_cached_prefixes(tp: int, pp: int) -> None:
    rows = expected(decoder())
    with ranks(decoder(), tp, pp, **IN_PARTS) as llm:
        for _ in range(2):
            for found, row in zip(answers(llm, random_ids(110)), rows, strict=True):
                assert_close(found, row)
        assert llm.engine.metrics.chunks > 0
        assert llm.engine.metrics.cached_tokens > 0
        cache = llm.engine._cache
        assert cache is not None
        assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_request_that_fails_on_one_rank_fails_alone(tp: int, pp: int) -> None:
    """Then memory is short there, and in the end the rank is killed: what an engine goes through."""
    with loaded(tiny_llama()) as llm:
        texts = [[1, 20 + n, *[30] * (n % 5)] for n in range(12)]
        one = [request.future.result(60) for request in submit(llm, texts)]
    with faulty(), ranks(tiny_llama(), tp, pp, max_num_seqs=8) as llm:
        requests = submit(llm, [*texts[:5], [1, BAD, 30], *texts[5:]])
        [bad] = [requests.pop(5)]
        with pytest.raises(EngineError, match=f"request {bad.request_id}: the model raised ValueError: boom"):
            bad.future.result(60)
        for request, row in zip(requests, one, strict=True):
            assert_close(request.future.result(60), row)
        metrics = llm.engine.metrics
        assert 0 < metrics.failed_batches <= 4, "only batches with the bad request count"

        requests = submit(llm, [[1, NO_MEMORY, 20], *texts[:2], [1, NO_MEMORY, 21]])
        for request, row in zip(requests[1:3], one, strict=False):
            assert_close(request.future.result(60), row)
        assert all(request.future.result(60).isfinite().all() for request in requests)
        assert metrics.out_of_memory == 1

        running, waiting = submit(llm, [[1, STUCK]]), []
        while llm.engine.health().status != "busy":
            time.sleep(0.01)
        waiting = [request for _ in range(5) for request in submit(llm, texts)]
        pids = pids_of(llm)
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(pids[-1], signal.SIGKILL)
        done = wait([request.future for request in (*running, *waiting)], timeout=10)
        assert not done.not_done
        assert time.monotonic() - killed < 10
        message = f"rank {tp * pp - 1} of {tp * pp} (process {pids[-1]}) was killed by signal 9 (SIGKILL)"
        for request in running:
            with pytest.raises(EngineDeadError, match=re.escape(message)):
                request.future.result(0)
        assert llm.engine.health().status == "dead"
        assert llm.engine.health().message == message
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            submit(llm, texts)


def test_an_idle_engine_dies_with_a_rank_and_ends_the_others() -> None:
    with loaded(encoder(), tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        pids = pids_of(llm)
        os.kill(pids[0], signal.SIGKILL)
        wait_until_gone(pids)
        end = time.monotonic() + 10
        while llm.engine.health().status != "dead" and time.monotonic() < end:
            time.sleep(0.01)
        assert "rank 1 of 4" in llm.engine.health().message


def test_stages_work_on_several_batches_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PASSES, str(tmp_path / "passes"))
    with faulty(), ranks(tiny_llama(), 1, 2, max_num_seqs=1) as llm:
        requests = submit(llm, [[1, SLOW, 20 + n] for n in range(8)])
        for request in requests:
            request.future.result(60)
    lines = [line.split() for line in (tmp_path / "passes").read_text().splitlines()]
    first, second = ([(float(a), float(b)) for stage, a, b in lines if stage == which] for which in "01")
    assert len(first) == len(second) == 8
    at_once = [one for one in first if any(one[0] < other[1] and other[0] < one[1] for other in second)]
    assert len(at_once) >= 6, "all but the first"


def test_what_a_rank_cannot_load_is_the_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the second stage are damaged, and rank 0 does not read them."""
    folder = copy_of(tiny_llama())
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, file, metadata={"format": "pt"})
    before = children()
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' has shape \[3\], the model expects \[32\]"):
        loaded(folder, pipeline_parallel_size=2).__enter__()
    assert children() <= before


def test_a_rank_that_does_not_start_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(processes_module, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(processes_module, "START_S", 0.5)
    with pytest.raises(EngineError, match=r"rank 1 of 2 \(process \d+\) has not started within 0 s"):
        loaded(tiny_llama(), tensor_parallel_size=2).__enter__()
    monkeypatch.setattr(processes_module, "_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(processes_module, "START_S", 60)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 \(process \d+\) ended with exit code 3"):
        loaded(tiny_llama(), tensor_parallel_size=2).__enter__()
    assert children() <= before


def test_two_engines_of_ranks_in_one_process_are_refused() -> None:
    with (
        ranks(tiny_llama(), 1, 2),
        pytest.raises(ConfigError, match=r"holds its model with 2 ranks, .* close it first"),
    ):
        loaded(tiny_llama()).__enter__()


@pytest.mark.parametrize("how", ["ends", "waits, killed", "waits, interrupted"])
def test_ranks_end_with_the_program(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    what, _, end = how.partition(", ")
    command = [sys.executable, "-m", "tests.distributed.script", str(tiny_llama()), what]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            word, *pids = program.stdout.readline().split()
            assert word == "ranks"
            if end == "killed":
                assert all(is_running(int(pid)) for pid in pids)
                program.kill()
            elif end == "interrupted":
                program.send_signal(signal.SIGINT)
            code = program.wait(60)
            assert (code == 0) == (what == "ends")
        finally:
            program.kill()
        wait_until_gone(list(map(int, pids)))
        assert not list(tmp_path.glob("anypool-ranks-*")), "files over which they met"


@contextmanager
def faulty() -> Iterator[None]:
    ModelRegistry.register_model("LlamaForCausalLM", FaultyForCausalLM)
    try:
        yield
    finally:
        ModelRegistry._own.pop("LlamaForCausalLM")


def children() -> set[int]:
    """Processes that this thread has started and that run."""
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in pids if is_running(int(pid))}


def test_a_rank_that_hangs_does_not_outlive_close_and_another_engine_may_follow() -> None:
    rows = expected(encoder())
    llm = LLM(encoder(), device="cpu", tensor_parallel_size=2, use_tqdm_on_load=False)
    pids = pids_of(llm)
    os.kill(pids[0], signal.SIGSTOP)
    requests = submit(llm, random_ids(110))
    llm.engine.close(timeout_s=1)
    for request in requests:
        with pytest.raises(EngineDeadError, match="the engine is shut down"):
            request.future.result(1)
    wait_until_gone(pids)
    with ranks(encoder(), 2, 1) as llm:
        for row, other in zip(answers(llm, random_ids(110)), rows, strict=True):
            assert_close(row, other)


def test_a_slow_rank_is_waited_for_and_a_stopped_one_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "patience_s", lambda stuck_after_s: 3.0)
    with faulty(), loaded(tiny_llama(), pipeline_parallel_size=2, stuck_after_s=0.5) as llm:
        requests = submit(llm, [[1, STUCK]])
        time.sleep(4)
        assert llm.engine.health().status == "stuck"
        [pid] = pids_of(llm)
        os.kill(pid, signal.SIGSTOP)
        requests += submit(llm, [[1, 20], [1, 21]])
        for request in requests:
            with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(process {pid}\) hangs: .* nothing for 3 s"):
                request.future.result(20)
        assert llm.engine.health().status == "dead"
        wait_until_gone([pid])


def test_time_in_which_the_machine_sleeps_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = AwakeClock()
    for step in (1.0, 0.5, 3600.0, 1.0):
        now += step
        clock.tick()
    assert clock.seconds == 1.0 + 0.5 + 2 * LOOK_S + 1.0


def test_an_engine_of_ranks_that_was_given_up_is_named_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RanksExecutor, "open_ranks", 4)
    with pytest.raises(ConfigError, match="holds its model with 4 ranks"):
        loaded(tiny_llama()).__enter__()
