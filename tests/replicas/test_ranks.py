"""Replicas that are several processes each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from anypool.engine.replicas import Replicas
from tests.helpers import RAGGED, assert_close, embed, loaded, tiny_llama, vectors
from tests.replicas.test_replicas import is_running, wait_for


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def test_a_rank_that_dies_costs_no_request_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    expected = embed(tiny_llama(), RAGGED)
    with loaded(tiny_llama(), data_parallel_size=2, tensor_parallel_size=2) as llm:
        engine = llm.engine
        assert isinstance(engine, Replicas)
        assert_close(vectors(llm, RAGGED), expected)
        victim = engine._replicas[1]
        replica, [rank] = victim.pid, children_of(victim.pid)
        os.kill(rank, signal.SIGKILL)
        assert_close(vectors(llm, RAGGED * 4), expected.repeat(4, 1))
        wait_for(lambda: victim.is_ready and victim.pid != replica)
        assert_close(vectors(llm, RAGGED), expected)
        ranks = [process for one in engine._replicas for process in (one.pid, *children_of(one.pid))]
        assert len(ranks) == 4
        assert "replica 1 exited with code 1" in caplog.text
    wait_for(lambda: not any(map(is_running, [rank, replica, *ranks])))
