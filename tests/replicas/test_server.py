"""`anypool serve --data-parallel-size 2` as a program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers import tiny_bert
from tests.replicas.test_replicas import WAIT_S, is_running, wait_for


@pytest.fixture
def server(root: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "anypool", "serve", str(tiny_bert()), "--data-parallel-size", "2"]
    command += ["--port", "0", "--device", "cpu", "--served-model-name", "bert"]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if (found := re.search(r"http://\S+:\d+", line)) is not None:
                    break
            assert found is not None
            with httpx.Client(base_url=found[0], timeout=WAIT_S) as client:
                yield process, client
        finally:
            process.kill()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def metric(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_server_of_replicas_answers_counts_and_ends_without_leaving_any(
    server: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    process, client = server
    for path in ("/health", "/health/live"):
        assert client.get(path).status_code == 200
    body = client.post("/v1/embeddings", json={"input": ["a cat", "a mat", "a story"]}).json()
    assert [len(row["embedding"]) for row in body["data"]] == [32, 32, 32]
    assert metric(client, 'anypool_inputs_total{model="bert",outcome="ok"}') == 3
    assert metric(client, 'anypool_computed_tokens_total{model="bert"}') == body["usage"]["prompt_tokens"]
    assert metric(client, 'anypool_queue_seconds_count{model="bert"}') == 3
    assert metric(client, 'anypool_replicas{model="bert"}') == 2
    assert client.get("/info").json()["card"]["class"] == "BertForEmbedding"
    first, second = children_of(process.pid)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: metric(client, 'anypool_replicas{model="bert"}') == 1)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/embeddings", json={"input": "a cat"}).status_code == 200
    wait_for(lambda: metric(client, 'anypool_replicas{model="bert"}') == 2)
    children = children_of(process.pid)
    assert second in children
    assert first not in children
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    wait_for(lambda: not any(map(is_running, children)))
